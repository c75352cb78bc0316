"""Runs one loaded version of an ensemble. `call` runs each request."""

import asyncio
import time

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, unavailable
from charonia.core.request import InferRequest
from charonia.core.response import Reply
from charonia.server.ensembles.call import EnsembleCall, Infer, InferAtOnce
from charonia.server.ensembles.plan import EnsemblePlan
from charonia.server.execution.admission import Admission, with_request_id
from charonia.server.execution.clock import now_ns
from charonia.server.execution.tracing import begin
from charonia.server.metrics.model_metrics import FailureReason, ModelMetrics
from charonia.server.metrics.options import chosen_buckets


def never_at_once(request: InferRequest) -> None:
    """Return None: every request is run by `Infer`."""


class EnsembleRunner:
    """One loaded version of an ensemble.

    Args:
        version: The version, as text.
        plan: Its steps.
        infer: Runs a step.
        infer_at_once: Runs a step before it returns, where that is possible.

    Attributes:
        config: The complete configuration.
        version: The version, as text.
        infer: Runs a step.
        infer_at_once: Runs a step before it returns, where that is possible.
    """

    def __init__(
        self, version: str, plan: EnsemblePlan, infer: Infer, infer_at_once: InferAtOnce = never_at_once
    ) -> None:
        self.version = version
        self.infer = infer
        self.infer_at_once = infer_at_once
        self.metrics = ModelMetrics(plan.config.name, version, chosen_buckets(plan.config))
        self._calls: set[EnsembleCall] = set()
        self._is_stopping = False
        self._idle: asyncio.Event | None = None
        self.replace_plan(plan)

    def replace_plan(self, plan: EnsemblePlan) -> None:
        """Use another plan for new requests: the models of the steps have changed."""
        self.config: ModelConfig = plan.config
        self._plan = plan
        self._admission = Admission(plan.config)

    @property
    def pending(self) -> None:
        """None: requests wait for the models of the steps, and are counted there."""

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    def submit(self, request: InferRequest, reply: Reply) -> EnsembleCall:
        if request.trace is not None:
            reply = begin(request.trace, request, reply, (self.config.name, self.version))
        call = EnsembleCall(self, self._plan, request, reply, now_ns())
        try:
            if self._is_stopping:
                raise unavailable(f"ensemble '{self.config.name}' has stopped accepting new requests: it is unloaded")
            call.batch_size, _ = self._admission.check(request)
            try:
                route = self._plan.route(request)
            except ServingError as error:
                raise with_request_id(error, request) from error
        except ServingError as error:
            call.fail(error, FailureReason.OTHER)
            return call
        self._calls.add(call)
        call.start(route)
        return call

    def run_at_once(self, request: InferRequest) -> None:
        """Return None: one of its steps may have to wait."""

    def succeeded(self, call: EnsembleCall, queue_ns: int, compute_ns: int) -> None:
        now = now_ns()
        self.metrics.composed(
            duration_ns=now - call.arrival_ns,
            inferences=call.batch_size,
            queue_ns=queue_ns,
            compute_ns=compute_ns,
            end_ns=now,
            wall_ms=int(time.time() * 1000),
        )

    def ended(self, call: EnsembleCall) -> None:
        self._calls.discard(call)
        if self._idle is not None and not self._calls:
            self._idle.set()

    async def drain(self) -> None:
        self._is_stopping = True
        while self._calls:
            self._idle = asyncio.Event()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Do nothing: the steps belong to other models."""

    def abandon(self, error: ServingError) -> None:
        """Answer all requests in flight with `error`: the time limit of the shutdown has passed."""
        for call in list(self._calls):
            call.fail(error, FailureReason.OTHER)
