"""The runner of requests that name no version of a model with traffic: it chooses the version of each.

It replaces a version's runner for requests without a version, so a model without traffic has no part of
it on its way.
"""

from collections.abc import Mapping

from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.response import Outcome, Reply, Ticket
from charonia.server.execution.clock import now_ns
from charonia.server.execution.version_runner import Runner
from charonia.server.sequences.runner import SequenceRunner
from charonia.server.traffic.figures import VersionFigures
from charonia.server.traffic.shadowing import Shadowing
from charonia.server.traffic.state import ModelTraffic, choose, point_of
from charonia.wire.traffic import BY_CORRELATION

Target = tuple[str, str]
"""Model name and version as text, "" for none."""


class SplitRunner:
    """Sends each request to a version. See `Runner`.

    Args:
        traffic: The traffic of the model, with at least one version that is ready.
        shadowing: Sends copies to shadow versions.

    Attributes:
        main: The runner of the version with most of the requests: it answers queries about the model.
    """

    def __init__(self, traffic: ModelTraffic[Runner], shadowing: Shadowing) -> None:
        most = traffic.main()
        assert most is not None
        self.runners = traffic.runners
        self.main = main = traffic.runners[most]
        self.config = main.config
        self.version = main.version
        self.metrics = main.metrics
        settings = traffic.settings
        self._traffic = traffic
        self._shadowing = shadowing if settings.shadow else None
        self._weights = traffic.weights()
        self._default = most
        self._by_correlation = settings.sticky == BY_CORRELATION
        self._sequences = {
            version: runner
            for version, runner in self.runners.items()
            if isinstance(runner, SequenceRunner) and not runner.is_iterative
        }

    @property
    def pending(self) -> None:
        """None: requests wait for instances of versions, and are counted there."""

    @property
    def in_flight(self) -> int:
        return sum(self._traffic.figures(version).in_flight for version in self.runners)

    def submit(self, request: InferRequest, reply: Reply) -> Ticket:
        version = self._version_for(request)
        figures = self._traffic.figures(version)
        if self._shadowing is not None:
            reply = self._shadowing.copied(request, version, reply)
        figures.sent()
        return self.runners[version].submit(request, _Counted(figures, reply))

    def run_at_once(self, request: InferRequest) -> None:
        """Return None: the version that `submit` chooses decides."""

    async def drain(self) -> None:
        """Do nothing: the versions are drained."""

    async def aclose(self) -> None:
        """Do nothing: the versions are closed."""

    def abandon(self, error: ServingError) -> None:
        """Do nothing: the versions answer their requests."""

    def _version_for(self, request: InferRequest) -> int:
        """Return the version of a request: that of its open sequence, of its client, or the next one."""
        sequence = request.correlation_id
        if sequence and self._sequences:
            for version, runner in self._sequences.items():
                if runner.holds(sequence):
                    return version
        client = request.affinity or (sequence if self._by_correlation else "")
        point = point_of(self.config.name, client) if client else self._traffic.points.next()
        chosen = choose(self._weights, self.runners, point)
        return self._default if chosen is None else chosen


class _Counted:
    """The reply of a request that counts what came of it."""

    __slots__ = ("_begun_ns", "_figures", "_is_failed", "_reply")

    def __init__(self, figures: VersionFigures, reply: Reply) -> None:
        self._figures = figures
        self._reply = reply
        self._is_failed = False
        self._begun_ns = now_ns()

    def __call__(self, outcome: Outcome, final: bool) -> None:
        is_error = isinstance(outcome, ServingError)
        if final:
            if is_error and outcome.code is Code.CANCELLED:  # type: ignore[union-attr]
                self._figures.given_up(now_ns() - self._begun_ns)
            elif is_error or self._is_failed:
                self._figures.failed()
            else:
                self._figures.answered(now_ns() - self._begun_ns)
        self._is_failed = self._is_failed or is_error
        self._reply(outcome, final)


def unsplit(runner: Runner) -> Runner:
    return runner.main if isinstance(runner, SplitRunner) else runner


def hand_over_sequences(before: Mapping[Target, object], after: Mapping[Target, object]) -> None:
    """Keep open sequences on their versions, even on versions that requests without a version no longer reach."""
    for target, runner in after.items():
        previous = before.get(target)
        if previous is runner or not (isinstance(runner, SplitRunner) or isinstance(previous, SplitRunner)):
            continue
        heir = runner.main if isinstance(runner, SplitRunner) else runner
        staying = {str(version) for version in runner.runners} if isinstance(runner, SplitRunner) else set()
        earlier = previous.runners.values() if isinstance(previous, SplitRunner) else [previous]
        for each in earlier:
            if isinstance(heir, SequenceRunner) and isinstance(each, SequenceRunner) and each.version not in staying:
                heir.follow(each)
