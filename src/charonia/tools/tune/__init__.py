"""The configuration search behind `charonia tune`: which settings of a model perform best within the user's limits."""
