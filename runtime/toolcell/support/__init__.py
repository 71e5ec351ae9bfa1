"""Small helpers that any floor may use. They know nothing of sandboxes, tools or runs."""
