"""The life of one request: admission, runner, batch, executor."""
