"""TensorFlow models, each instance in a worker process that is forked from one that has imported TensorFlow."""
