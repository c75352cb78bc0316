"""Who may make which call: API keys with scopes, restricted parts of the protocol, forwarded headers."""
