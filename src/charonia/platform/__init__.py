"""The platform: a registry of models, environments and deployments, with a page, an API and a command line.

It is never in the data path: it stores the desired state, and a target applies it.

Its functions raise `ServingError`: INVALID_ARG for what a caller sent, NOT_FOUND, ALREADY_EXISTS where the present
state forbids a change, UNAVAILABLE while a database, store, server or cluster does not answer, or a limit is reached.
Docstrings name other errors only, and these where an interface has several implementations.
"""
