"""`charonia explain`: what limits a model, and what to change."""
