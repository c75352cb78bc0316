"""Versions of models that are tried before they are deployed."""
