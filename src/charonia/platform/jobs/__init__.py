"""Measurements that are started from a model or a deployment: `charonia perf` and `charonia tune`."""
