"""The second tower: load generator, configuration search and their reports."""
