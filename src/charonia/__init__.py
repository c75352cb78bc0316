"""Charonia: an inference server for Triton model repositories."""
