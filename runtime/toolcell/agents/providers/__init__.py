"""Models behind an API, and the Protocol that any model implements."""
