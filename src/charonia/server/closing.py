"""Closing what may fail to close."""

import logging
from collections.abc import Awaitable

_log = logging.getLogger(__name__)


async def close_safely(closing: Awaitable[None], what: str) -> None:
    """Close something and log a failure, which must not keep the server from closing the rest."""
    try:
        await closing
    except Exception:
        _log.exception("closing %s", what)
