"""The rate limiter: instances share resources."""
