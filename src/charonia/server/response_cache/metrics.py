"""Metrics of a response cache as a whole."""

from collections.abc import Mapping

from charonia.server.metrics.metric_families import Family, family

_NS_PER_US = 1000
_NO_LABELS: Mapping[str, str] = {}


class CacheCounters:
    """Look-ups and insertions.

    Attributes:
        hits: Look-ups that found a response.
        misses: Look-ups that found none.
        lookup_ns: Total time of look-ups.
        insertion_ns: Total time of insertions.
    """

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.lookup_ns = 0
        self.insertion_ns = 0

    def looked_up(self, is_hit: bool, duration_ns: int) -> None:
        """Count a look-up."""
        self.lookup_ns += duration_ns
        if is_hit:
            self.hits += 1
        else:
            self.misses += 1

    def inserted(self, duration_ns: int) -> None:
        self.insertion_ns += duration_ns


def cache_families(counters: CacheCounters) -> list[Family]:
    return [
        _plain("nv_cache_num_lookups", "gauge", "Look-ups in the response cache", counters.hits + counters.misses),
        _plain("nv_cache_num_hits", "gauge", "Look-ups that found a response", counters.hits),
        _plain("nv_cache_num_misses", "gauge", "Look-ups that found none", counters.misses),
        _plain(
            "nv_cache_lookup_duration", "gauge", "Total time of look-ups in microseconds",
            counters.lookup_ns // _NS_PER_US,
        ),
        _plain(
            "nv_cache_insertion_duration", "gauge", "Total time of insertions in microseconds",
            counters.insertion_ns // _NS_PER_US,
        ),
    ]  # fmt: skip


def local_families(used: float, entries: int, evictions: int) -> list[Family]:
    """Return the metrics of a cache in memory: the share in use, 0 to 1, its entries and evictions."""
    return [
        _plain("nv_cache_util", "gauge", "Share of the response cache in use, 0 to 1", used),
        _plain("nv_cache_num_entries", "gauge", "Responses in the cache", entries),
        _plain("nv_cache_num_evictions", "gauge", "Responses evicted from the cache", evictions),
    ]


def remote_families(is_up: bool, errors: int, skipped: int) -> list[Family]:
    """Return the metrics of a cache in another server: whether it is up, failed operations, skipped operations."""
    return [
        _plain("charonia_cache_up", "gauge", "Whether the cache server responds", int(is_up)),
        _plain("charonia_cache_errors_total", "counter", "Look-ups and insertions that failed", errors),
        _plain(
            "charonia_cache_skipped_total", "counter", "Look-ups and insertions that were skipped",
            skipped,
        ),
    ]  # fmt: skip


def _plain(name: str, kind: str, help: str, value: float) -> Family:
    return family(name, kind, help, (value, _NO_LABELS))
