"""The configuration search behind `charonia tune`: which settings of a model give the most within the user's limits."""
