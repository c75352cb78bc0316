"""What runs in the workers of TensorFlow models: a Python model. The server imports none of it."""
