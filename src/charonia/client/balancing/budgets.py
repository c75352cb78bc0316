"""The budget of retries, and the time to hedge a request. Pure."""

from collections import deque

TOKENS_MAX = 100.0
"""Retries and hedges that a client can have saved up."""

SAMPLES_MAX = 128
"""Recent latencies of a model that its 95th percentile is taken from."""

SAMPLES_MIN = 20
"""Latencies from which the percentile is known."""

MODELS_MAX = 1024
"""Limit of models whose latencies are known; beyond it, all are discarded."""

_SORT_EVERY = 16


class RetryBudget:
    """Limits retries and hedges to a share of the requests, so that they do not multiply the load of busy servers.

    Args:
        ratio: Retries that a request adds.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._tokens = TOKENS_MAX if ratio else 0.0

    def deposit(self) -> None:
        self._tokens = min(self._tokens + self._ratio, TOKENS_MAX)

    def spend(self) -> bool:
        """Take one retry; return whether there was one."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Latencies:
    """The 95th percentile of the recent latencies of each model."""

    def __init__(self) -> None:
        self._models: dict[str, _Recent] = {}

    def add(self, model: str, latency_ns: int) -> None:
        """A model has answered."""
        recent = self._models.get(model)
        if recent is None:
            if len(self._models) >= MODELS_MAX:
                self._models.clear()
            recent = self._models[model] = _Recent()
        recent.add(latency_ns)

    def p95_ns(self, model: str) -> int | None:
        """Return the percentile, None where it is not known yet."""
        recent = self._models.get(model)
        return recent.p95_ns if recent is not None else None


class _Recent:
    __slots__ = ("_since", "_values", "p95_ns")

    def __init__(self) -> None:
        self._values: deque[int] = deque(maxlen=SAMPLES_MAX)
        self._since = 0
        self.p95_ns: int | None = None

    def add(self, latency_ns: int) -> None:
        self._values.append(latency_ns)
        self._since += 1
        if self._since >= (_SORT_EVERY if self.p95_ns is not None else SAMPLES_MIN):
            self._since = 0
            ordered = sorted(self._values)
            self.p95_ns = ordered[len(ordered) * 95 // 100]
