"""Prompts and patches, encoded once, before the transformer is loaded."""
