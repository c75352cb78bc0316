"""Deployments: specifications, revisions, and the reconciler that applies them."""
