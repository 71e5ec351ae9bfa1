"""Several sandboxes in one container."""
