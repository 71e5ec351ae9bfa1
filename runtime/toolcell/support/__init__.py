"""Small helpers that know nothing of sandboxes, tools or runs. There is no face: modules are imported by name."""
