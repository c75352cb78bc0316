"""What runs in the workers of language models: a Python model around an engine. The server imports none of it."""
