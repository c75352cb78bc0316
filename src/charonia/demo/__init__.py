"""The demo: a repository of models that packages ship, real inputs, the public client, and what it measured.

It sees the server over the wire only, as any user's program would.
"""
