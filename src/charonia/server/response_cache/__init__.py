"""Responses that are kept: their keys, and where they are kept."""
