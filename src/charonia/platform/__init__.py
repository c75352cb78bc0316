"""The platform: a registry of models, environments and deployments, with a page, an API and a command line.

It is never in the data path: it stores the desired state, and a target applies it.
"""
