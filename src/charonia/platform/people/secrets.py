"""Secrets that the platform gives out: keys, links, cookies. It keeps their SHA-256 only."""

import hashlib
import secrets

SECRET_BYTES = 32


def new_secret(prefix: str = "") -> str:
    return prefix + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: str) -> str:
    """Return what is kept of a secret. It is long and random, so that a plain hash is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()
