"""Commands, one file each. The only place that reads arguments and the environment."""
