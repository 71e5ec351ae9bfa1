"""Sandboxes on the nodes of a Ray cluster; tools, audit and limits stay with the caller."""
