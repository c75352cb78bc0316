"""Load for language models: prompts, requests of several APIs, and what the tokens of their responses say."""
