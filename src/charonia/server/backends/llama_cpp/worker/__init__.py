"""What runs in the workers of the `llama_cpp` backend, with llama.cpp. The server imports none of it."""
