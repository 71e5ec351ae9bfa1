"""The programs that are started inside sandboxes: `python -m toolcell_bridge.entry.<name>`."""
