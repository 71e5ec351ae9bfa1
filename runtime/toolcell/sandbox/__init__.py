"""Backends that start sandboxes, the pool that keeps them warm, and what is read out of them.

Knows limits and layers; knows nothing of tools, registries or what a script is for.
"""
