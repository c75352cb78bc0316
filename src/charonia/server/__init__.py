"""The first tower: the inference server."""
