"""Puts a loaded version behind the response cache, where its configuration and the server's options ask for that."""

import asyncio
import logging
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING

from charonia.cache.api import ResponseCache
from charonia.config.json_form import to_json
from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.engine.cached import CachedRunner
from charonia.repository.content import content_digest
from charonia.repository.scan import ModelFolder

if TYPE_CHECKING:
    from charonia.engine.loader import Runner

_log = logging.getLogger(__name__)


def wants_cache(config: ModelConfig) -> bool:
    """Whether a configuration asks for a response cache."""
    return config.response_cache is not None and config.response_cache.enable


async def key_space(cache: ResponseCache | None, folder: ModelFolder, version: int, config: ModelConfig) -> bytes:
    """Return the key space of a version that is being loaded; nothing where there is no cache.

    Every model has one, as an ensemble whose responses are kept may contain it.
    """
    if cache is None:
        if wants_cache(config):
            _log.warning("'%s' asks for a response cache, and the server has none (--cache-config)", config.name)
        return b""
    content = b""
    if cache.is_shared:
        text = repr(to_json(config)).encode()
        files = await asyncio.to_thread(content_digest, folder, version)
        content = sha256(sha256(text).digest() + files).digest()
    return await cache.space(config.name, str(version), content)


def ensemble_space(config: ModelConfig, members: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Return the key space of an ensemble: another one whenever one of its models is loaded again.

    Args:
        config: Its configuration.
        members: Name, version and key space of each version of its models.
    """
    parts = "\n".join(f"{name} {version} {space.hex()}" for name, version, space in sorted(members))
    return sha256(f"{to_json(config)!r}\n{parts}".encode()).digest()


def behind_cache(runner: "Runner", cache: ResponseCache | None, space: bytes) -> "Runner":
    """Return the runner, behind the cache where it asks for one and there is one.

    Raises:
        ServingError: INVALID_ARG for an ensemble that gives any number of responses.
    """
    config = runner.config
    if not wants_cache(config):
        return runner
    if config.is_decoupled:  # of an ensemble only its models tell
        raise invalid(
            f"response_cache.enable: Response Cache does not currently support model {config.name} with 'decoupled' "
            "transaction policy. Please disable the response cache."
        )
    return CachedRunner(runner, cache, space) if cache is not None else runner
