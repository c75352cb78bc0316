"""Input data of the load generator: generated, or from JSON, .npy, folders and pictures."""
