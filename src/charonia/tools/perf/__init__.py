"""The load generator: sends requests to a server, measures, and judges how far to trust the numbers."""
