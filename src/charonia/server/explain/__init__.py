"""Explains what limits a model and what to change."""
