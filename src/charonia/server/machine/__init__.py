"""The machine: cores, memory, GPUs."""
