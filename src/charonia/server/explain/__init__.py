"""`charonia explain`: the bottleneck of a model, and what to change."""
