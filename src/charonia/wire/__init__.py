"""Codecs without I/O: bytes and messages to records and back."""
