"""Load for language models: prompts, requests of several APIs, and figures of the tokens of their responses."""
