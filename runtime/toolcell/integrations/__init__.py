"""toolcell in other people's agent frameworks: one module for each, and an extra of the same name.

`pip install 'toolcell[smolagents]'` is what `toolcell.integrations.smolagents` needs. Nothing is imported here.
"""
