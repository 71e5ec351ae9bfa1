"""Embedding providers: texts to vectors."""
