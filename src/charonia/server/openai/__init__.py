"""OpenAI's API: its routes, the requests to models that speak it, and the adapter for all other models."""
