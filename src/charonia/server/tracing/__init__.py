"""Tracing: which requests are traced, and the destinations of traces."""
