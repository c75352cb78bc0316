"""Python models, each instance in a supervised worker process."""
