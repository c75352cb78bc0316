"""The Python model that runs the engine of a language model, in a worker process.

The engine has its own file, `BACKEND/worker/NAME.py`, whose class `Engine` is made with an `EngineSetup`. All
of its methods are called in one thread, that of an event loop:

- `async start()` loads the model.
- `async answer(request)` answers a `LanguageRequest`. It is cancelled when the caller goes or the request's time is
  over, and then lets the engine work on it no longer.
- `problem()` returns why the engine has died, "" while it lives. It is asked every `WATCH_S` seconds.
- `async stop()` ends it.
"""

import asyncio
import importlib
import json
import os
import signal
import sys
import threading
import traceback
import types
from functools import partial
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

REQUESTS_MAX = 8192
"""Default of `max_requests`: open requests of an engine; with more, a request is refused."""

WATCH_S = 1.0
"""Time between two looks at the engine's health."""

STOP_S_MAX = 5.0
"""Time that an engine has to end."""

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_PACKAGE = "charonia_engine"
_BACKENDS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_RETURN = "return_"
_OPTIONS = ("text_input", "stream", "streaming", "sampling_parameters", "exclude_input_in_output", "image")

# Request parameters that are the server's.
_RESERVED = ("openai", "lora_name")

_DTYPES = {"cumulative_logprob": np.float32, "num_input_tokens": np.uint32, "num_output_tokens": np.uint32}


class RequestError(Exception):
    """What is wrong with a request; `code` is that of a `TritonError`."""

    def __init__(self, message: str, code: int = pb_utils.TritonError.INVALID_ARG) -> None:
        super().__init__(message)
        self.code = code


class EngineSetup:
    """What an engine is made with.

    Attributes:
        version_dir: Folder of the version.
        routes: OpenAI's routes that the model has; requests to others are refused.
        options: What the server's side of the backend has read.
        threads: Cores that the engine may use.
        number: Number of the instance in its group, from 0.
        folder: A folder for sockets, which only this user may enter; the workers of the version share it.
        pb_utils: The API of Python models: the log, metrics, codes of errors.
        invalid: Makes the exception that refuses a request: INVALID_ARG with this text.
        error: The same with the code of a `TritonError` after the text.
    """

    def __init__(self, arguments: dict[str, str]) -> None:
        self.model_name = arguments["model_name"]
        self.version_dir = os.path.join(arguments["model_repository"], arguments["model_version"])
        self.config: dict[str, Any] = json.loads(arguments["model_config"])
        routes = self.config.get("parameters", {}).get("openai_routes", {}).get("string_value", "")
        self.routes = frozenset(route.strip() for route in routes.split(","))
        self.options: dict[str, Any] = json.loads(arguments["options"])
        self.threads = int(arguments["threads"])
        self.device_id = int(arguments["model_instance_device_id"])
        self.number = int(arguments["model_instance_name"].rpartition("_")[2])
        self.folder = arguments["folder"]
        self.pb_utils = pb_utils
        self.invalid = self.error = RequestError

    @staticmethod
    def die(problem: str) -> None:
        """End the process, as the engine has died: the server fails what is open, and starts another process."""
        print(f"the engine has died: {problem}", file=sys.stderr, flush=True)
        os._exit(1)


class LanguageRequest:
    """A request.

    Attributes:
        id: Its id, "" for none.
        route: OpenAI's route that it came by, "" for one that follows Triton's contract.
        text: The prompt, or with a route the JSON document of the client.
        stream: Whether the answer is wanted in pieces.
        excludes_input: Whether the prompt is left out of the answer; None where the request does not say.
        returns: Names of the other outputs that are requested.
        sampling: Sampling parameters by name, whatever way they came; not checked.
        images: Images, in base64.
        is_over: Whether the last response is on its way.
    """

    def __init__(self, request: Any, sender: Any, outbox: "_Outbox") -> None:
        self.is_over = False
        self._sender = sender
        self._outbox = outbox
        inputs = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}
        self.id: str = request.request_id()
        self.parameters: dict[str, Any] = json.loads(request.parameters())
        self.route = str(self.parameters.get("openai", ""))
        self.text = _text(inputs["text_input"][0], "text_input")
        self.stream = bool(_first(inputs, "stream") or _first(inputs, "streaming"))
        excludes = _first(inputs, "exclude_input_in_output")
        self.excludes_input = (True if self.stream else None) if excludes is None else bool(excludes)
        if self.stream and not self.excludes_input:
            raise RequestError("input 'exclude_input_in_output': expected true with 'stream', got false")
        self.returns = frozenset(
            name.removeprefix(_RETURN) for name in inputs if name.startswith(_RETURN) and _first(inputs, name)
        )
        self.images = [_text(image, "image") for image in inputs.get("image", ())]
        self.sampling = {} if self.route else _sampling(inputs, self.parameters)

    @property
    def body(self) -> dict[str, Any]:
        """The document of the client."""
        return _object(self.text)

    def send(self, outputs: dict[str, Any], parameters: dict[str, Any] | None = None, *, final: bool = False) -> None:
        """Send a response, together with others of this turn of the event loop.

        Args:
            outputs: A value, a list of some, or an array, by name of the output; text is str or bytes.
            parameters: Response parameters.
            final: Whether it is the last.
        """
        tensors = []
        for name, value in outputs.items():
            if not isinstance(value, np.ndarray):
                value = np.array(value if isinstance(value, list) else [value], _DTYPES.get(name, object))
            tensors.append(pb_utils.Tensor(name, value))
        self.is_over = final
        response = pb_utils.InferenceResponse(tensors, parameters=parameters)
        self._outbox.put(self._sender, response, _FINAL if final else 0)


class TritonPythonModel:
    """An engine, and the event loop that it works in."""

    def initialize(self, arguments: dict[str, str]) -> None:
        self._loop = _new_loop()
        self._outbox = _Outbox(self._loop)
        self._tasks: set[asyncio.Task[None]] = set()
        parameters = json.loads(arguments["model_config"]).get("parameters", {})
        self._most = int(parameters.get("max_requests", {}).get("string_value", REQUESTS_MAX))
        setup = EngineSetup(arguments)
        self._routes = {"", *setup.routes}
        self._engine = _engine_class(arguments["engine"])(setup)
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        asyncio.run_coroutine_threadsafe(self._engine.start(), self._loop).result()
        for number, handler in handlers.items():  # engines that are servers of their own have set others
            signal.signal(number, handler)
        self._loop.call_soon_threadsafe(self._watch)

    def execute(self, requests: list[Any]) -> None:
        taken = [(request, request.get_response_sender()) for request in requests]
        self._loop.call_soon_threadsafe(self._begin, taken)

    def finalize(self) -> None:
        ending = asyncio.run_coroutine_threadsafe(self._engine.stop(), self._loop)
        ending.result(STOP_S_MAX)

    def _begin(self, taken: list[Any]) -> None:
        for request, sender in taken:
            if len(self._tasks) >= self._most:
                text = f"the model has {self._most} requests already (hint: try again later)"
                error = pb_utils.TritonError(text, pb_utils.TritonError.UNAVAILABLE)
                self._outbox.put(sender, pb_utils.InferenceResponse(error=error), _FINAL)
                continue
            task = self._loop.create_task(self._answer(request, sender))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            sender.when_cancelled(partial(self._loop.call_soon_threadsafe, task.cancel))

    async def _answer(self, request: Any, sender: Any) -> None:
        made = error = None
        try:
            made = LanguageRequest(request, sender, self._outbox)
            if made.route not in self._routes:
                raise RequestError(f"the model has no route '{made.route}'")
            await self._engine.answer(made)
        except asyncio.CancelledError:
            pass
        except RequestError as refused:
            error = pb_utils.TritonError(str(refused), refused.code)
        except Exception as failed:
            pb_utils.Logger.log_error(traceback.format_exc())
            text = f"the engine failed: {type(failed).__name__}: {failed}"
            error = pb_utils.TritonError(text, pb_utils.TritonError.INTERNAL)
        if made is None or not made.is_over:
            self._outbox.put(sender, pb_utils.InferenceResponse(error=error) if error is not None else None, _FINAL)

    def _watch(self) -> None:
        problem = self._engine.problem()
        if problem:
            EngineSetup.die(problem)
        self._loop.call_later(WATCH_S, self._watch)


class _Outbox:
    """Responses of one turn of the event loop, which are sent together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[Any, Any, int]] = []

    def put(self, sender: Any, response: Any, flags: int) -> None:
        """Send a response at the end of this turn."""
        if not self._waiting:
            self._loop.call_soon(self._send)
        self._waiting.append((sender, response, flags))

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        pb_utils.send_together(waiting)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: one of uvloop, which costs less for each event, where the environment has it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _engine_class(path: str) -> Any:
    """Return the class in an engine's file, `BACKEND/worker/NAME.py`.

    It may import from its folder, and from `...language.worker`, relatively.
    """
    folder, file = os.path.split(path)
    backend, worker = os.path.split(folder)
    root, backend = os.path.split(backend)
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [root, _BACKENDS]
    sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{backend}.{worker}.{os.path.splitext(file)[0]}").Engine


def _first(inputs: dict[str, Any], name: str) -> Any:
    values = inputs.get(name)
    return None if values is None or not values.size else values[0]


def _text(element: Any, name: str) -> str:
    try:
        return element.decode() if isinstance(element, bytes) else str(element)
    except UnicodeDecodeError as error:
        raise RequestError(f"input '{name}': expected UTF-8, got {error.object[error.start : error.end]!r}") from None


def _sampling(inputs: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters: of the JSON text, of inputs of their names, and of the request's parameters."""
    sampling = {name: value for name, value in parameters.items() if name not in _RESERVED and name.isidentifier()}
    for name, values in inputs.items():
        if name not in _OPTIONS and not name.startswith(_RETURN) and values.size:
            found = [_text(value, name) if isinstance(value, bytes) else value.item() for value in values]
            sampling[name] = found if values.size > 1 else found[0]
    text = _first(inputs, "sampling_parameters")
    if text is not None:
        sampling.update(_object(_text(text, "sampling_parameters") or "{}", "input 'sampling_parameters': "))
    return sampling


def _object(text: str, place: str = "") -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{place}expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(f"{place}expected a JSON object, got {type(found).__name__}")
    return found
