"""Usage and limits of API keys: requests, errors and tokens of each key. Pure.

A limit of N a minute lets N through immediately, then one every 60/N s. The tokens of a request are known at its end:
a key that has used more than its limit waits until the excess is made up for.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass

from charonia.core.errors import ServingError, over_limit
from charonia.core.request import Flow
from charonia.core.response import Outcome, Reply
from charonia.core.statistics import TokenUsage
from charonia.server.metrics.metric_families import Family, family
from charonia.server.metrics.tokens import TokenMetrics, TokenStream

KEYS_COUNTED_MAX = 1000
"""Keys with counters of their own; others share one."""

OTHER = "(other)"

MINUTE_NS = 60_000_000_000
_NS_PER_S = 1_000_000_000

_IGNORED = TokenMetrics()


@dataclass(slots=True)
class KeyUsage:
    """What the requests with a key have used.

    Attributes:
        requests: Requests that were let through.
        errors: Those of them that failed.
        refused: Requests beyond the limits.
    """

    requests: int = 0
    errors: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, more: "KeyUsage") -> None:
        self.requests += more.requests
        self.errors += more.errors
        self.refused += more.refused
        self.prompt_tokens += more.prompt_tokens
        self.completion_tokens += more.completion_tokens


@dataclass(slots=True)
class Allowance:
    """What a limit a minute still permits: `until_ns` is when all of it is available again."""

    until_ns: int = 0

    def wait_ns(self, limit: int, now_ns: int) -> int:
        """Return the time until one more is permitted, 0 for none."""
        return max(0, max(self.until_ns, now_ns) + MINUTE_NS // limit - now_ns - MINUTE_NS)

    def spend(self, amount: int, limit: int, now_ns: int) -> None:
        self.until_ns = max(self.until_ns, now_ns) + amount * MINUTE_NS // limit


class Usage:
    """Counts the requests of keys, and refuses those beyond the limits of their keys.

    Args:
        clock: Returns the time, in ns.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._used: dict[str, KeyUsage] = {}
        self._requests: dict[str, Allowance] = {}
        self._tokens: dict[str, Allowance] = {}

    def of(self, key: str) -> KeyUsage:
        """Return the counters of a key."""
        if key not in self._used and len(self._used) >= KEYS_COUNTED_MAX:
            key = OTHER
        return self._used.setdefault(key, KeyUsage())

    def begin(self, flow: Flow, reply: Reply) -> Reply | None:
        """Count a request of a key; return where its outcomes go. None if it was refused."""
        key, used, now_ns = flow.key, self.of(flow.key), self._clock()
        for what, limit, allowances in (
            ("requests", flow.requests_per_minute, self._requests),
            ("tokens", flow.tokens_per_minute, self._tokens),
        ):
            if limit and (wait_ns := _of(allowances, key, now_ns).wait_ns(limit, now_ns)):
                used.refused += 1
                message = f"API key '{key}' has used its limit of {limit} {what} a minute"
                reply(over_limit(message, retry_after_s=-(-wait_ns // _NS_PER_S)), True)
                return None
        if flow.requests_per_minute:
            self._requests[key].spend(1, flow.requests_per_minute, now_ns)
        used.requests += 1
        tokens = TokenStream(_IGNORED, 0)

        def take(outcome: Outcome, final: bool) -> None:
            if isinstance(outcome, ServingError):
                used.errors += 1
            elif outcome is not None:
                tokens.take(outcome, 0)
            if final and (usage := tokens.usage()) is not None:
                self.count_tokens(flow, usage)
            reply(outcome, final)

        return take

    def count_tokens(self, flow: Flow, usage: TokenUsage) -> None:
        """Count the tokens of a request of a key."""
        used = self.of(flow.key)
        used.prompt_tokens += usage.prompt
        used.completion_tokens += usage.completion
        if limit := flow.tokens_per_minute:
            now_ns = self._clock()
            _of(self._tokens, flow.key, now_ns).spend(usage.prompt + usage.completion, limit, now_ns)

    def take(self) -> dict[str, tuple[int, ...]]:
        """Return the counts since the last call by key, as `count` takes them."""
        taken, self._used = self._used, {}
        return {key: astuple(used) for key, used in taken.items()}

    def count(self, taken: Mapping[str, Iterable[int]]) -> None:
        """Add the counts of another process."""
        for key, counts in taken.items():
            self.of(key).add(KeyUsage(*counts))

    def families(self) -> list[Family]:
        requests: list[tuple[float, dict[str, str]]] = []
        tokens: list[tuple[float, dict[str, str]]] = []
        for key, used in sorted(self._used.items()):
            results = {"ok": used.requests - used.errors, "error": used.errors, "refused": used.refused}
            requests += [(count, {"key": key, "result": result}) for result, count in results.items()]
            kinds = {"prompt": used.prompt_tokens, "completion": used.completion_tokens}
            tokens += [(count, {"key": key, "kind": kind}) for kind, count in kinds.items()]
        return [
            family("charonia_key_requests_total", "counter", "Requests with an API key", *requests),
            family("charonia_key_tokens_total", "counter", "Tokens of requests with an API key", *tokens),
        ]


def _of(allowances: dict[str, Allowance], key: str, now_ns: int) -> Allowance:
    if key not in allowances and len(allowances) >= KEYS_COUNTED_MAX:  # those that have everything again
        for other in [name for name, each in allowances.items() if each.until_ns <= now_ns]:
            del allowances[other]
    return allowances.setdefault(key, Allowance())
