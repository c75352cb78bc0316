"""Loading, reloading, unloading and eviction of models."""
