"""Secrets that the platform issues: keys, links, cookies. It stores only their SHA-256."""

import hashlib
import secrets

SECRET_BYTES = 32


def new_secret(prefix: str = "") -> str:
    return prefix + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: str) -> str:
    """Return the stored form of a secret. Secrets are long and random, so a plain hash is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()
