"""Counting and measuring, pure: histograms, model statistics, Prometheus text."""
