"""Metrics: histograms, statistics of models, and the Prometheus text format."""
