"""toolcell."""
