"""Codecs without input or output: bytes and messages to records and back."""
