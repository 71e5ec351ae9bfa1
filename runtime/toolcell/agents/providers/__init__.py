"""The Protocol that every model implements, and adapters for models behind an API."""
