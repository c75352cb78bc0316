"""The registry of models and their versions."""
