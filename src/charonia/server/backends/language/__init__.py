"""What backends of language models have in common: inputs and outputs, and the Python model that runs an engine."""
