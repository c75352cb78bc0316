"""Language models in GGUF files, run by llama.cpp in worker processes."""
