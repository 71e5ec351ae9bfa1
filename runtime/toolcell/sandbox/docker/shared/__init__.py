"""Shared containers: several sandboxes in one container (`mode="forked"`)."""
