"""Sandboxes of another machine, a node: its server there, and the connection of each sandbox."""
