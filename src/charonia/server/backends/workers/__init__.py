"""Models in worker processes: start, supervision, batches, and what the server does for a model."""
