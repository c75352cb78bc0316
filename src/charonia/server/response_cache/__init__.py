"""Response caches: keys, and storage in memory or Redis."""
