"""Measurements of a model or a deployment: `charonia perf` and `charonia tune`."""
