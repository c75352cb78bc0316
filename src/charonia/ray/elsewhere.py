"""Calls of Python models to models in other applications of the Ray cluster."""

import asyncio
import copyreg
import time
from collections.abc import Mapping
from typing import Any

from ray import serve

from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError, internal, unavailable, unsupported
from charonia.core.request import FIELDS, InferRequest, RequestedOutput
from charonia.core.response import ExecutionRecord, InferResponse, Reply, Ticket
from charonia.core.tensor import Tensor
from charonia.server.backends.api import Models

Failure = tuple[str, str, str]
"""Code, message and hint of an error on its way between replicas."""


_RECORDS: dict[type[Any], tuple[str, ...]] = {
    ExecutionRecord: ("instance", "batch_size", "queue_ns", "compute_ns"),
    InferRequest: FIELDS,
    InferResponse: ("model_name", "model_version", "id", "outputs", "parameters", "execution"),
    RequestedOutput: ("name", "classification"),
    Tensor: ("name", "datatype", "array"),
}
"""Classes of messages between replicas, with the arguments of their constructors. Compiled ones cannot be pickled."""


def _made(kind: type[Any], arguments: Mapping[str, object]) -> object:
    return kind(**arguments)


def _reduced(record: object) -> tuple[Any, ...]:
    kind = type(record)
    return _made, (kind, {name: getattr(record, name) for name in _RECORDS[kind]})


for _kind in _RECORDS:
    copyreg.pickle(_kind, _reduced)


def sent(request: InferRequest) -> tuple[InferRequest, int]:
    """Return a request as it goes to another replica, and how long its caller waits, in ns; 0 for no limit."""
    left_ns = max(request.deadline_ns - time.monotonic_ns(), 1) if request.deadline_ns else 0
    here = {"deadline_ns", "caller", "trace", "affinity"}  # what means nothing there
    return InferRequest(**{name: getattr(request, name) for name in {*FIELDS} - here}), left_ns


def received(request: InferRequest, left_ns: int) -> InferRequest:
    """Return a request that came from another replica, with its deadline by this machine's clock."""
    request.deadline_ns = time.monotonic_ns() + left_ns if left_ns else 0
    return request


class ModelsElsewhere:
    """The models of this replica, and some of other applications.

    Args:
        models: The models of this replica.
        applications: Application of each of the others, by model.
    """

    def __init__(self, models: Models, applications: Mapping[str, str]) -> None:
        self._models = models
        self._applications = applications
        self._handles: dict[str, Any] = {}

    def infer(self, request: InferRequest, reply: Reply) -> Ticket:
        """Run a request, here or in the application that has the model."""
        if request.model_name not in self._applications:
            return self._models.infer(request, reply)
        return asyncio.get_running_loop().create_task(self._ask(request, reply))  # type: ignore[return-value]

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model is ready."""
        if name not in self._applications:
            return await self._models.model_ready(name, version)
        ready: bool = await (await self._handle(name)).model_ready.remote(name, version)
        return ready

    def is_loadable(self, name: str) -> bool:
        """Whether a request for this model waits for it: their application decides for other models."""
        return name in self._applications or self._models.is_loadable(name)

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """Return the configuration of a model of this replica."""
        if name in self._applications:
            raise unavailable(f"model '{name}' is in the application '{self._applications[name]}'")
        return self._models.model_config(name, version)

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model of this replica."""
        self._check_here(name)
        await self._models.load_model(name, config, files)

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model of this replica."""
        self._check_here(name)
        await self._models.unload_model(name, unload_dependents)

    def _check_here(self, name: str) -> None:
        if name in self._applications:
            raise unsupported(f"model '{name}' cannot be controlled: it is in '{self._applications[name]}'")

    async def _ask(self, request: InferRequest, reply: Reply) -> None:
        name = request.model_name
        try:
            outcome = await self._answer(request)
        except asyncio.CancelledError:
            reply(ServingError(Code.CANCELLED, f"the request to model '{name}' was cancelled"), True)
            raise
        except ServingError as error:
            outcome = error
        except Exception as error:  # of Ray: a replica that was killed, an application that is gone
            outcome = internal(f"model '{name}' of the application '{self._applications[name]}': {error}")
        reply(outcome, True)

    async def _answer(self, request: InferRequest) -> InferResponse | ServingError:
        handle = await self._handle(request.model_name)
        response = handle.infer.remote(*sent(request))
        try:
            outcome: InferResponse | Failure = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        if isinstance(outcome, InferResponse):
            return outcome
        code, message, hint = outcome
        return ServingError(Code(code), message, hint=hint)

    async def _handle(self, name: str) -> Any:
        """Return the handle of the application that has a model."""
        application = self._applications[name]
        if application not in self._handles:
            # Asks Ray's controller, and waits for its answer.
            try:
                self._handles[application] = await asyncio.to_thread(serve.get_app_handle, application)
            except Exception as error:
                raise unavailable(
                    f"model '{name}': the application '{application}' cannot be reached: {error}",
                    hint="deploy it in the same Ray cluster, by this name",
                ) from error
        return self._handles[application]
