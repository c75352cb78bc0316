"""Backends: what runs a model. The interface is in `api`; each backend is one module or package beside it."""
