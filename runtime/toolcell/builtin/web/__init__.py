"""Requests to the web on behalf of a model: which addresses, which hosts, how much, and what a page says."""
