"""What runs in the workers of TensorRT-LLM models. The server imports none of it."""
