"""The runner of requests that name no version of a model with traffic: it chooses the version of each.

It replaces a version's runner for requests without a version, so a model without traffic has no part of
it on its way.

`Shadowing` sends copies of requests to a shadow version:

1. A copy is sent when the request that it copies has been answered, so it cannot fail it, and delays it by no more than
   it takes to copy its tensors. Copies of requests that were answered with an error are not sent.
2. At most `COPIES_MAX` copies of a model, with at most `COPIES_BYTES_MAX` of tensors, are under way. What comes then is
   not copied, and counted.
3. Tensors are copied: their memory may belong to the client, or be used again.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from charonia.clock import now_ns
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome, Reply, Ticket
from charonia.core.tensor import Array, DeviceTensor, Tensor, array_bytes
from charonia.server.execution.version_runner import Runner
from charonia.server.sequences.runner import SequenceRunner
from charonia.server.traffic.canary import VersionFigures
from charonia.server.traffic.state import EvenPoints, ModelTraffic, choose, point_of
from charonia.wire.traffic import BY_CORRELATION, Shadow

COPIES_MAX = 64
"""Copies of the requests of a model that are under way."""

COPIES_BYTES_MAX = 256 * 2**20
"""Bytes of their inputs, and of the answers that they are compared with."""

COMPARED_AT_ONCE_BYTES = 64 * 1024
"""Answers up to this size are compared immediately; larger ones in a thread."""


def differs(given: Sequence[Tensor], copied: Sequence[Tensor], shadow: Shadow) -> bool:
    """Return whether the outputs of a copy differ from the original outputs.

    Outputs are compared by name, with datatype and shape. Floating-point numbers may differ by the tolerances; NaN
    equals NaN. Everything else must be equal.
    """
    others = {tensor.name: tensor for tensor in copied}
    return others.keys() != {tensor.name for tensor in given} or any(
        _differ(tensor, others[tensor.name], shadow) for tensor in given
    )


def _differ(one: Tensor, other: Tensor, shadow: Shadow) -> bool:
    if one.datatype is not other.datatype or one.shape != other.shape:
        return True
    a, b = _numbers(one), _numbers(other)
    if a.dtype.kind != "f":
        return not np.array_equal(a, b)
    return not np.allclose(b, a, rtol=shadow.relative_tolerance, atol=shadow.absolute_tolerance, equal_nan=True)


def _numbers(tensor: Tensor) -> Array:
    if tensor.datatype is DataType.BF16:
        return (tensor.array.astype(np.uint32) << 16).view(np.float32)
    return tensor.array


class Shadowing:
    """Sends copies to the shadow versions of a model.

    Args:
        traffic: The traffic of the model.
    """

    def __init__(self, traffic: ModelTraffic[Runner]) -> None:
        self.traffic = traffic
        self.count = 0  # copies under way
        self.size_bytes = 0
        self._points: dict[int, EvenPoints] = {}

    def copied(self, request: InferRequest, version: int, reply: Reply) -> Reply:
        """Return the reply of a request that a version answers: it sends the copies."""
        for shadow_version, shadow in self.traffic.settings.shadow.items():
            if shadow_version == version or shadow_version not in self.traffic.runners:
                continue
            point = self._points.setdefault(shadow_version, EvenPoints()).next()
            if point < shadow.share:
                copy = self._copy(request, shadow_version)
                if copy is None:
                    self.traffic.shadows[shadow_version].dropped += 1
                else:
                    reply = _Copy(self, shadow_version, shadow, *copy, reply)
        return reply

    def _copy(self, request: InferRequest, version: int) -> tuple[InferRequest, int] | None:
        """Return a copy of a request and its size; None if it is not copied."""
        size = _size_of(request.inputs.values())
        if size is None or self.count >= COPIES_MAX or self.size_bytes + size > COPIES_BYTES_MAX:
            return None
        self.count += 1
        self.size_bytes += size
        inputs = {name: Tensor(name, each.datatype, each.array.copy()) for name, each in request.inputs.items()}
        copy = InferRequest(
            request.model_name,
            inputs,
            model_version=str(version),
            id=request.id,
            outputs=request.outputs,
            parameters=dict(request.parameters),
            priority=request.priority,
            timeout_us=request.timeout_us,
        )
        return copy, size


class _Copy:
    """A copy in progress: the reply of both the original request and its copy."""

    __slots__ = ("_given", "_loop", "_owner", "_reply", "_request", "_sent_ns", "_shadow", "_size", "_version")

    def __init__(
        self, owner: Shadowing, version: int, shadow: Shadow, request: InferRequest, size: int, reply: Reply
    ) -> None:
        self._owner = owner
        self._version = version
        self._shadow = shadow
        self._request = request
        self._size = size
        self._reply = reply
        self._given: list[Tensor] = []
        self._sent_ns = 0
        self._loop = asyncio.get_running_loop()

    def __call__(self, outcome: Outcome, final: bool) -> None:
        try:
            self._reply(outcome, final)
        finally:
            if final:
                self._answered(outcome)

    def _answered(self, outcome: Outcome) -> None:
        if not isinstance(outcome, InferResponse):
            self._end()
            return
        size = _size_of(outcome.outputs)
        if size is None or self._owner.size_bytes + size > COPIES_BYTES_MAX:
            self._owner.traffic.shadows[self._version].dropped += 1
            self._end()
            return
        self._size += size
        self._owner.size_bytes += size
        self._given = [Tensor(each.name, each.datatype, each.array.copy()) for each in outcome.outputs]
        self._loop.call_soon(self._send)

    def _send(self) -> None:
        runner = self._owner.traffic.runners.get(self._version)
        if runner is None:
            self._end()
            return
        self._owner.traffic.shadows[self._version].sent += 1
        self._sent_ns = now_ns()
        runner.submit(self._request, self._copied)

    def _copied(self, outcome: Outcome, final: bool) -> None:
        if not final:
            return
        latency_ns = now_ns() - self._sent_ns
        if isinstance(outcome, ServingError) or outcome is None:
            self._owner.traffic.shadows[self._version].failed += 1
            self._end()
        elif (_size_of(outcome.outputs) or 0) <= COMPARED_AT_ONCE_BYTES:
            self._count(latency_ns, differs(self._given, outcome.outputs, self._shadow))
        else:
            compared = self._loop.run_in_executor(None, differs, self._given, outcome.outputs, self._shadow)
            compared.add_done_callback(lambda done: self._count(latency_ns, done.cancelled() or done.result()))

    def _count(self, latency_ns: int, is_different: bool) -> None:
        self._owner.traffic.shadows[self._version].answered(latency_ns, is_different=is_different)
        self._end()

    def _end(self) -> None:
        self._owner.count -= 1
        self._owner.size_bytes -= self._size


def _size_of(tensors: Iterable[Tensor]) -> int | None:
    """Return the bytes of tensors, None if one is in GPU memory."""
    size = 0
    for tensor in tensors:
        if isinstance(tensor, DeviceTensor):
            return None
        size += array_bytes(tensor.array)
    return size


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
        return sum(self._traffic.figures[version].in_flight for version in self.runners)

    def submit(self, request: InferRequest, reply: Reply) -> Ticket:
        version = self._version_for(request)
        figures = self._traffic.figures[version]
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
        is_abandoned = isinstance(outcome, ServingError) and outcome.code is Code.CANCELLED
        self._is_failed = self._is_failed or (isinstance(outcome, ServingError) and not is_abandoned)
        if final:
            if self._is_failed:  # also if its client left after an error
                self._figures.failed()
            elif is_abandoned:
                self._figures.abandoned(now_ns() - self._begun_ns)
            else:
                self._figures.answered(now_ns() - self._begun_ns)
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
