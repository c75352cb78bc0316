"""Language models of TensorRT-LLM: each instance is an engine of its LLM API in a worker process."""
