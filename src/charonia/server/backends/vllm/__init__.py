"""Language models of vLLM: each instance is an engine in a worker process."""
