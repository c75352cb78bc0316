"""`charonia doctor`: what this machine offers to models, and what the models of a repository need."""
