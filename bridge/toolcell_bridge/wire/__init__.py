"""The bridge protocol, the same code for host and guest."""
