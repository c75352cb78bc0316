"""What runs in the workers of vLLM models: a Python model. The server imports none of it."""
