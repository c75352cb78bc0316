"""Options of the response cache and of the rate limiter: from the text of an argument to what it means."""

import os
import re
from collections.abc import Sequence

from charonia.cli.values import integer
from charonia.core.errors import ServingError
from charonia.server.rate_limiter.options import ResourceLimit
from charonia.server.response_cache.options import cache_options

COUNT_MAX = 2**31 - 1

_NEXT_SETTING = re.compile(r",(?=[a-z_]+=)")


def cache_setting(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Read `<cache>,<key>=<value>`, with any number of `<key>=<value>`."""
    cache, comma, rest = text.partition(",")
    pairs = [pair.partition("=") for pair in _NEXT_SETTING.split(rest)]
    if not cache or not comma or not all(equals and key for key, equals, _ in pairs):
        raise ValueError("expected <cache>,<key>=<value>, e.g. local,size=1048576")
    return cache, tuple((key, value) for key, _, value in pairs)


def cache_fields(values: Sequence[tuple[str, tuple[tuple[str, str], ...]]]) -> dict[str, object]:
    """Put the settings of the cache together, as fields of `ServerOptions`; of one given twice, the last counts."""
    if len({cache for cache, _ in values}) > 1:
        raise ValueError("found multiple cache configurations, but only a single cache is supported")
    settings = {key: value for _, pairs in values for key, value in pairs}
    try:
        options = cache_options(values[0][0], settings, os.environ)
    except ServingError as error:
        raise ValueError(error.message) from error
    return {"cache.local_bytes": options.local_bytes, "cache.redis": options.redis}


def resource_limit(text: str) -> ResourceLimit:
    """Read `<name>:<count>` or `<name>:<count>:<device>`."""
    name, *rest = text.split(":")
    if not name or not 1 <= len(rest) <= 2:
        raise ValueError(f"expected <name>:<count> or <name>:<count>:<device>, got '{text}'")
    count = integer(0, COUNT_MAX)(rest[0])
    return ResourceLimit(name, count, integer(0, COUNT_MAX)(rest[1]) if len(rest) == 2 else None)
