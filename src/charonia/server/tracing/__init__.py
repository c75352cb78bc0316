"""Tracing of the server: which requests are traced, and where the traces go."""
