"""What runs in the process that tries a forest's file: a Python model. The server imports none of it."""
