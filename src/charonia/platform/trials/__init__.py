"""Tries versions of models before they are deployed."""
