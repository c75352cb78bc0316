"""Requests of different shapes in one batch: ragged batches and padding."""
