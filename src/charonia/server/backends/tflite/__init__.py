"""The TensorFlow Lite backend, on LiteRT.

The package is imported when the first model needs it.

An interpreter is not thread-safe, so each instance has its own; they share the content of the file. What is called here
is what the signature runner of LiteRT calls beneath the interpreter: the runner resizes all inputs before every run.
"""
