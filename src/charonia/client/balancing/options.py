"""How a client balances requests among servers. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from charonia.core.errors import invalid


@dataclass(frozen=True, slots=True)
class Balancing:
    """How a client balances requests among several servers.

    Attributes:
        resolve_s: Time between two look-ups of a DNS name, in seconds.
        tries_max: Limit of servers that a request is sent to, one after the other. Only requests that no model has seen
            are sent again.
        retry_ratio: Retries and hedges that each request adds to what may be spent on them.
        errors_max: Failures in a row after which a server is ejected.
        slow_factor: A server is ejected when its mean latency is this multiple of the others' median; 0 for never.
        stall_s: Time without a response to anything in flight after which the client probes its readiness.
        probe_timeout_s: Timeout of such a probe.
        eject_s: Time until the client probes an ejected server. It doubles with each ejection and each failed probe.
        eject_s_max: Limit of that time.
        hedge_after_s: Time after which a request without an answer is sent to a second server, too; "p95" for the time
            in which 95 % of the recent requests to its model had an answer; None for never.
        idempotent_models: Models whose requests may run twice, so that `hedge_after_s` applies to them; "*" for all.
            Requests of sequences and streams are never hedged.
        prefix_load: Prompts (`text_input`) that begin alike go to one server, whose cache has their beginning, unless
            it would have more than this multiple of the mean requests in flight; 0 for no affinity.
    """

    resolve_s: float = 10.0
    tries_max: int = 3
    retry_ratio: float = 0.2
    errors_max: int = 5
    slow_factor: float = 5.0
    stall_s: float = 3.0
    probe_timeout_s: float = 1.0
    eject_s: float = 1.0
    eject_s_max: float = 10.0
    hedge_after_s: float | Literal["p95"] | None = None
    idempotent_models: Collection[str] = ()
    prefix_load: float = 0.0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ServingError: INVALID_ARG.
        """
        for name in ("resolve_s", "stall_s", "probe_timeout_s", "eject_s", "eject_s_max"):
            if not getattr(self, name) > 0:
                raise invalid(f"{name}: expected a number of seconds above 0, got {getattr(self, name)!r}")
        for name in ("tries_max", "errors_max"):
            if getattr(self, name) < 1:
                raise invalid(f"{name}: expected at least 1, got {getattr(self, name)!r}")
        if not 0 <= self.retry_ratio <= 1:
            raise invalid(f"retry_ratio: expected 0 to 1, got {self.retry_ratio!r}")
        if self.slow_factor and self.slow_factor <= 1:
            raise invalid(f"slow_factor: expected more than 1, or 0 for never, got {self.slow_factor!r}")
        if self.prefix_load and self.prefix_load < 1:
            raise invalid(f"prefix_load: expected at least 1, or 0 for no affinity, got {self.prefix_load!r}")
        hedge = self.hedge_after_s
        if isinstance(self.idempotent_models, str):
            raise invalid(f"idempotent_models: expected a list of names, got '{self.idempotent_models}'")
        if hedge is not None and not self.idempotent_models:
            raise invalid("hedge_after_s: expected models whose requests may run twice in idempotent_models, got none")
        if hedge is not None and hedge != "p95" and (isinstance(hedge, str) or hedge < 0):
            raise invalid(f"hedge_after_s: expected a number of seconds, 'p95' or None, got {hedge!r}")


DEFAULT = Balancing()
