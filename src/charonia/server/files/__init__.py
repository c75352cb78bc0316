"""Files in place of a repository: what they are, and the repository that serves them."""
