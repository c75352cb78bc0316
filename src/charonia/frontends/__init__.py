"""Front ends: decode, call the engine, encode. Nothing else."""
