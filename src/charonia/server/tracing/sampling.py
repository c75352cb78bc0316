"""Picks the requests that are traced. Pure."""

from collections.abc import Callable

from charonia.core.trace import RemoteParent, TraceIds, TraceLevel, TraceTree
from charonia.wire.trace_settings import TraceSettings


class Sampling:
    """The sampling under one setting. A changed setting gets a new object.

    Args:
        settings: The setting.
        allows_remote: Whether a request with a trace of its sender is traced regardless of rate and count.

    Attributes:
        settings: The setting.
        count_left: Traces that may still begin, -1 for no limit.
        is_retired: Whether a new setting has replaced this one, and its traces until then were written.
        open: Traces that have begun and are not written.
        collected: Traces that were handed over to be written.
    """

    __slots__ = ("_allows_remote", "_seen", "collected", "count_left", "is_retired", "open", "settings")

    def __init__(self, settings: TraceSettings, *, allows_remote: bool) -> None:
        self.settings = settings
        self.count_left = settings.count
        self.is_retired = False
        self.open = 0
        self.collected = 0
        self._allows_remote = allows_remote
        self._seen = 0

    @property
    def is_active(self) -> bool:
        """Whether it can still pick a request."""
        settings = self.settings
        if settings.level == TraceLevel.OFF:
            return False
        return self._allows_remote or (settings.rate > 0 and self.count_left != 0)

    @property
    def is_complete(self) -> bool:
        return self.count_left == 0 and not self.open

    def pick(self, remote: RemoteParent | None) -> bool:
        """Whether to trace the next request."""
        settings = self.settings
        if settings.level == TraceLevel.OFF:
            return False
        is_due = False
        if settings.rate and self.count_left:
            self._seen += 1
            is_due = self._seen % settings.rate == 0
            if is_due and self.count_left > 0:
                self.count_left -= 1
        return is_due or (remote is not None and self._allows_remote)


class RequestSampler:
    """Begins the traces of requests.

    Args:
        server: The setting of models without their own.
        models: Settings by model.
        ids: Generates the ids of traces and spans.
        done: Takes a finished tree, and the setting under which it began.
    """

    def __init__(
        self,
        server: Sampling,
        models: dict[str, Sampling],
        ids: TraceIds,
        done: Callable[[Sampling, TraceTree], None],
    ) -> None:
        self._server = server
        self._models = models
        self._ids = ids
        self._done = done

    def sample(self, model: str, remote: RemoteParent | None = None) -> TraceTree | None:
        """Return the beginning of a trace of a request, None where it is not traced.

        Args:
            model: The model that the request is for.
            remote: The trace of its sender, None where there is none.
        """
        sampling = self._models.get(model, self._server)
        if not sampling.pick(remote):
            return None
        sampling.open += 1

        def done(tree: TraceTree) -> None:
            sampling.open -= 1
            sampling.collected += 1
            self._done(sampling, tree)

        return TraceTree(sampling.settings.level, self._ids, done, remote if sampling._allows_remote else None)
