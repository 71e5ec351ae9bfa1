"""Stores of the built-in tools: one protocol for each capability, and three stores that have them all."""
