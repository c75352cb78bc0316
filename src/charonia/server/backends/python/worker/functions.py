"""Functions and objects as Python models: the methods of `TritonPythonModel` over the definitions of a service file.

A function is called in the thread of `execute`. Coroutines and asynchronous generators run on the event loop of the
instance, several at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

from ....channel.datatypes import TritonModelException
from .errors import TritonError, describe, failures, traced
from .function import Function
from .requests import FINAL, InferenceResponse
from .service import BadRequest, running
from .signature import kind_of_value
from .tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
    from typing import Any, ClassVar

    from ....channel.datatypes import Array
    from .host import Host
    from .model_config import ModelConfig
    from .requests import InferenceRequest
    from .service import Definition

END_S_MAX = 5.0
"""Time that coroutines have to end when the instance does."""

SHARED_PROCESS, SHARE_MEMORY = "SHARED_PROCESS", "SHARE_MEMORY"
"""Model parameters: "true" for a model that shares its process with others of its file; for one whose instances are
forked."""

_DEVICES = {"GPU": "cuda:{}"}


class FunctionModel:
    """A `TritonPythonModel` for the definitions of one file; `bound_to_file` makes the class of a file."""

    definitions: ClassVar[list[Definition]] = []
    host: ClassVar[Host]
    request_class: ClassVar[type[InferenceRequest]]
    complete: ClassVar[Callable[[Awaitable[object]], object]]
    _made: SharedObject | None = None

    @classmethod
    def find(cls, name: str) -> Definition:
        """Return the definition for a model: of its name, or the only one.

        Raises:
            ValueError: There are several, of other names.
        """
        if len(cls.definitions) == 1:
            return cls.definitions[0]
        for definition in cls.definitions:
            if definition.name == name:
                return definition
        names = ", ".join(definition.name for definition in cls.definitions)
        raise ValueError(f"the file of model '{name}' has no model of this name; it has {names}")

    @classmethod
    def auto_complete_config(cls, config: ModelConfig) -> ModelConfig:
        """Complete the configuration from the annotations."""
        definition = cls.find(config.as_dict().get("name", ""))
        Function(definition).complete(config)
        if definition.share_memory:
            config.as_dict()["parameters"].setdefault(SHARE_MEMORY, {"string_value": "true"})
        elif sum(not each.own_process for each in cls.definitions) > 1 and not definition.own_process:
            config.as_dict()["parameters"].setdefault(SHARED_PROCESS, {"string_value": "true"})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        definition = self.find(args["model_name"])
        self._function = function = Function(definition)
        target = definition.target
        if inspect.isclass(target) and not definition.is_object:
            device = _DEVICES.get(args["model_instance_kind"], "cpu").format(args["model_instance_device_id"])
            self._made = SharedObject.of(target, device, is_shared=bool(definition.method))
            target = self._made.target
        self._call = function.bound(target)
        code = self._call if inspect.isroutine(self._call) else type(self._call).__call__
        self._is_async = inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code)
        if definition.method and self._made is not None and not self._is_async:
            self._call = self._made.alone(self._call)
        self._slots = asyncio.Semaphore(definition.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls = ServiceCalls(self.request_class, {d.name: d for d in self.definitions})

    def execute(
        self, requests: list[InferenceRequest]
    ) -> list[InferenceResponse | None] | Coroutine[Any, Any, Any] | None:
        if self._function.is_batched and self._is_async:
            return self._batches_async(requests)
        token = running.set(self._calls)
        try:
            if self._function.is_batched:
                return self._batches(requests)
            if self._is_async:
                type(self).complete(self._start(requests))
                return None
            if self._function.signature.is_stream:
                for request in requests:
                    self._stream(request)
                return None
            return [self._single(request) for request in requests]
        finally:
            running.reset(token)

    def finalize(self) -> None:
        """End the instance: its `close`, where it is of a class that has one."""
        if self._tasks:
            loop = next(iter(self._tasks)).get_loop()
            asyncio.run_coroutine_threadsafe(_end(self._tasks.copy()), loop).result()
        if self._made is not None:
            self._made.release()

    def _arguments(self, request: InferenceRequest) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._function.arguments(self._function.read(_tensors(request), request.parameters()), 0)

    def _single(self, request: InferenceRequest) -> InferenceResponse:
        try:
            positional, keywords = self._arguments(request)
            returned = self._call(*positional, **keywords)
            accept = self._function.accepted(request.parameters())
            return _response(self._function.write(returned, accept=accept), self._function.parameters(returned))
        except BadRequest as error:
            return _refusal(error)

    def _stream(self, request: InferenceRequest) -> None:
        sender = request.get_response_sender()
        try:
            positional, keywords = self._arguments(request)
            items = self._call(*positional, **keywords)
            for item in items:
                if sender.is_cancelled():
                    if hasattr(items, "close"):
                        items.close()
                    break
                sender.send(_response(self._function.write(item)))
        except BadRequest as error:
            sender.send(_refusal(error))
        sender.send(flags=FINAL)

    def _batches(self, requests: list[InferenceRequest]) -> list[InferenceResponse | None]:
        batches = _Batches(self._function, requests)
        while batches.calls:
            positional, keywords, places = batches.calls.pop(0)
            try:
                batches.answer(places, self._call(*positional, **keywords))
            except BadRequest as error:
                batches.refuse(places, error)
        return batches.responses

    async def _batches_async(self, requests: list[InferenceRequest]) -> list[InferenceResponse | None]:
        running.set(self._calls)  # in the context of this task
        batches = _Batches(self._function, requests)
        while batches.calls:
            positional, keywords, places = batches.calls.pop(0)
            try:
                batches.answer(places, await self._call(*positional, **keywords))
            except BadRequest as error:
                batches.refuse(places, error)
        return batches.responses

    async def _start(self, requests: list[InferenceRequest]) -> None:
        """Start a coroutine for each request; wait while there are too many."""
        for request in requests:
            request.get_response_sender()
            await self._slots.acquire()
            task = asyncio.create_task(self._answer(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: InferenceRequest) -> None:
        running.set(self._calls)
        sender = request.get_response_sender()
        is_stream = self._function.signature.is_stream
        try:
            positional, keywords = self._arguments(request)
            returned = self._call(*positional, **keywords)
            if is_stream:
                async for item in returned:
                    if sender.is_cancelled():
                        await returned.aclose()
                        break
                    sender.send(_response(self._function.write(item)))
            else:
                value = await returned
                accept = self._function.accepted(request.parameters())
                written = self._function.write(value, accept=accept)
                sender.send(_response(written, self._function.parameters(value)), FINAL)
        except BadRequest as error:
            sender.send(_refusal(error), 0 if is_stream else FINAL)
        except failures() as error:
            self.host.raised([request.request_id()], traced(error))
            text = f"Failed to process the request(s) for model '{self.host.name}', message: {describe(error)}"
            sender.send(InferenceResponse(error=TritonError(text)), 0 if is_stream else FINAL)
        finally:
            if is_stream:
                sender.send(flags=FINAL)
            self._slots.release()


class SharedObject:
    """An object of a class in a service file, which its methods that are models share."""

    _shared: ClassVar[dict[tuple[type, str], SharedObject]] = {}
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, cls: Any, device: str) -> None:
        takes_device = "device" in inspect.signature(cls).parameters
        self.target: Any = cls(device=device) if takes_device else cls()
        self._lock = threading.Lock()
        self._users = 1

    @classmethod
    def of(cls, target: Any, device: str, *, is_shared: bool) -> SharedObject:
        """Return an object of a class for a user, made for the first of those that share it, or before a fork."""
        if not is_shared and (target, device) not in cls._shared:
            return SharedObject(target, device)
        with cls._making:
            made = cls._shared.get((target, device))
            if made is None:
                made = cls._shared[target, device] = SharedObject(target, device)
            else:
                made._users += 1
            return made

    def alone(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that runs while no other such method of the object does."""

        def called(*positional: Any, **keywords: Any) -> Any:
            with self._lock:
                return call(*positional, **keywords)

        return called

    def release(self) -> None:
        """Close the object if this was its last user."""
        with self._making:
            self._users -= 1
            if self._users:
                return
            for key in [key for key, made in self._shared.items() if made is self]:
                del self._shared[key]
        close = getattr(self.target, "close", None)
        if callable(close):
            close()


def make_object(definitions: Sequence[Definition], name: str) -> None:
    """Make the object of a model whose instances are forked from this process."""
    for each in definitions:
        if (each.name == name or len(definitions) == 1) and inspect.isclass(each.target) and not each.is_object:
            SharedObject.of(each.target, "cpu", is_shared=True)


class _Batches:
    """The calls for requests that came as a batch, and their responses.

    One call takes all requests that have the same inputs; that is one call but for optional inputs. If it refuses them
    with a BadRequest, each request is called again by itself.
    """

    def __init__(self, function: Function, requests: Sequence[InferenceRequest]) -> None:
        self._function = function
        self._values: dict[int, dict[str, Any]] = {}
        self.responses: list[InferenceResponse | None] = [None] * len(requests)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], list[tuple[int, int]]]] = []
        groups: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for index, request in enumerate(requests):
            tensors = _tensors(request)
            size = len(next(iter(tensors.values()))) if tensors else 1
            try:
                values = function.read(tensors, request.parameters())
                if function.signature.record is not None:
                    function.arguments(values, size)  # a request that makes no record must not fail the others
            except BadRequest as error:
                self.responses[index] = _refusal(error)
                continue
            self._values[index] = values
            groups.setdefault(tuple(values), []).append((index, size))
        for places in groups.values():
            self._add(places)

    def _add(self, places: list[tuple[int, int]]) -> None:
        values = [self._values[index] for index, _ in places]
        joined = {name: _joined([each[name] for each in values]) for name in values[0]}
        self.calls.append((*self._function.arguments(joined, sum(size for _, size in places)), places))

    def answer(self, places: list[tuple[int, int]], returned: Any) -> None:
        """Take what a call returned. A BadRequest in place of an item refuses the request of that item."""
        if isinstance(returned, list) and any(isinstance(item, BadRequest) for item in returned):
            places, returned = self._without_refused(places, returned)
        written = self._function.write(returned, sum(size for _, size in places)) if places else []
        start = 0
        for index, size in places:
            self.responses[index] = _response([(name, array[start : start + size]) for name, array in written])
            start += size

    def refuse(self, places: list[tuple[int, int]], error: BadRequest) -> None:
        """Refuse the only request of a call; the requests of others are called one by one."""
        if len(places) == 1:
            self.responses[places[0][0]] = _refusal(error)
            return
        for place in places:
            self._add([place])

    def _without_refused(
        self, places: list[tuple[int, int]], items: list[Any]
    ) -> tuple[list[tuple[int, int]], list[Any]]:
        left, kept, start = [], [], 0
        for index, size in places:
            own = items[start : start + size]
            refused = next((item for item in own if isinstance(item, BadRequest)), None)
            if refused is not None:
                self.responses[index] = _refusal(refused)
            else:
                left.append((index, size))
                kept += own
            start += size
        if start != len(items):
            raise ValueError(f"'{self._function.definition.name}' got a batch of {start} and returned {len(items)}")
        return left, kept


class ServiceCalls:
    """Calls other models for a model of a service file.

    Args:
        request_class: The request class of the model.
    """

    def __init__(self, request_class: type[InferenceRequest], siblings: Mapping[str, Definition]) -> None:
        self._request_class = request_class
        self._siblings = siblings
        self._functions: dict[str, Function] = {}

    def call(self, model: str, inputs: Mapping[str, object]) -> dict[str, Array]:
        return _outputs(self._request(model, inputs).exec())

    async def call_async(self, model: str, inputs: Mapping[str, object]) -> dict[str, Array]:
        return _outputs(await self._request(model, inputs).async_exec())

    def _request(self, model: str, inputs: Mapping[str, object]) -> InferenceRequest:
        if model in self._siblings and model not in self._functions:
            self._functions[model] = Function(self._siblings[model])
        function = self._functions.get(model)
        kinds = {port.name: port.kind for port in function.signature.inputs} if function is not None else {}
        tensors = []
        for name, value in inputs.items():
            if isinstance(value, np.ndarray):
                array = value
            elif function is not None and name in kinds:
                array = kinds[name].write(value)
                array = array[np.newaxis] if function.is_batched else array
            else:
                array = kind_of_value(value, is_batch=False).write(value)
            tensors.append(Tensor(name, array))
        return self._request_class(model_name=model, inputs=tensors, requested_output_names=[])


class _ServerLog(logging.Handler):
    """Sends what a service file logs to the server's log."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.hosts = [host]

    def emit(self, record: logging.LogRecord) -> None:
        level = 2 if record.levelno >= logging.ERROR else 1 if record.levelno >= logging.WARNING else 0
        for host in reversed(self.hosts):  # a model may have left the process
            with contextlib.suppress(Exception):  # a message that cannot be sent must not fail the request
                host.log(level, self.format(record), record.pathname, record.lineno)
                return


def log_to_server(host: Host) -> None:
    """Send the messages of `logging` in this process to the server's log, unless the file has set up its own."""
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(_ServerLog(host))
        if root.level == logging.WARNING:
            root.setLevel(logging.INFO)
    elif isinstance(root.handlers[0], _ServerLog):
        root.handlers[0].hosts.append(host)


def bound_to_file(
    definitions: list[Definition],
    host: Host,
    request_class: type[InferenceRequest],
    complete: Callable[[Awaitable[object]], object],
) -> type[FunctionModel]:
    """Return the class `TritonPythonModel` of a file with definitions.

    Args:
        complete: Completes a coroutine on the event loop of the instance.
    """
    body = {"definitions": definitions, "host": host, "request_class": request_class, "complete": complete}
    return type("TritonPythonModel", (FunctionModel,), body)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=END_S_MAX)


def _tensors(request: InferenceRequest) -> dict[str, Array]:
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _response(
    outputs: list[tuple[str, Array]], parameters: Mapping[str, str | int | bool] | None = None
) -> InferenceResponse:
    return InferenceResponse([Tensor(name, array) for name, array in outputs], parameters=parameters)


def _refusal(error: BadRequest) -> InferenceResponse:
    return InferenceResponse(error=TritonError(str(error), TritonError.INVALID_ARG))


def _outputs(response: Any) -> dict[str, Array]:
    error = response.error()
    if error is not None:
        raise TritonModelException(error.message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def _joined(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    return [item for batch in values for item in batch]
