"""Runs a Python model over any host: imports it, hands it requests, checks what it returns."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from ....channel.datatypes import TritonModelException
from . import triton_python_backend_utils as pb_utils
from .errors import RESCHEDULED, TritonError, describe, failures, record_step, traced
from .host import Binding
from .imports import ModelImports
from .requests import InferenceResponse, arrival, result_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Iterator, Sequence
    from typing import Any

    from .host import Failure, Fields, Host, Inbox, ModelBatch, Result
    from .requests import InferenceRequest
    from .tensor import Tensor


_preloaded: PythonModelRunner | None = None


def preload(path: str, version_dir: str, model_dir: str, name: str) -> None:
    """Import a model in a process that its workers are forked from, and make the object of a function's class."""
    global _preloaded
    runner = PythonModelRunner(None)  # type: ignore[arg-type] # each worker has its own, see `runner_for`
    runner._loaded = loaded = runner._make_imports(version_dir, model_dir).load(path)
    if isinstance(loaded, list):
        from .functions import make_object

        make_object(loaded, name)
    _preloaded = runner


def runner_for(host: Host) -> PythonModelRunner:
    """Return the runner of a process that has one model: the preloaded one, if it was forked from it."""
    if _preloaded is None:
        return PythonModelRunner(host)
    _preloaded._host = _preloaded._binding.host = host
    return _preloaded


class PythonModelRunner:
    """One instance of a model. All methods are called in one thread, the one that runs the model.

    Args:
        host: The host that runs it.
        shares_process: Whether there are other models in the process.
    """

    def __init__(self, host: Host, shares_process: bool = False) -> None:
        self._host = host
        self._shares_process = shares_process
        self._binding = Binding(host)
        self._pb_utils = pb_utils.bound_to(self._binding)
        self._request_class: type[InferenceRequest] = self._pb_utils.InferenceRequest
        self._imports: ModelImports | None = None
        self._loaded: Any = None  # by `preload`
        self._model: Any = None
        self._retries_alone = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None  # of an asynchronous model, from its first coroutine on

    def initialize(
        self, path: str, version_dir: str, model_dir: str, arguments: dict[str, str], is_decoupled: bool
    ) -> dict[str, object]:
        """Import and initialize the model; return what it can do."""
        imports = self._make_imports(version_dir, model_dir)
        self._binding.is_decoupled = is_decoupled
        parameters = self._binding.configure(arguments.get("model_config", "{}")).get("parameters") or {}
        self._retries_alone = parameters.get(RETRY_ALONE, {}).get("string_value") == "true"
        try:
            model = self._load(imports, path, parameters.get("MOUNTED_APP", {}).get("string_value", ""))()
            if not callable(getattr(model, "execute", None)):
                raise AttributeError(f"TritonPythonModel in {path} has no method 'execute'")
            if hasattr(model, "initialize"):
                with imports.visible():
                    model.initialize(arguments)
        except BaseException:
            imports.close()
            raise
        self._model = model
        self._binding.thread = threading.get_ident()
        self._binding.is_serving = True
        return {"has_is_ready": callable(getattr(model, "is_ready", None))}

    def complete(self, path: str, version_dir: str, model_dir: str, config_json: str) -> str:
        """Return the configuration as the model's `auto_complete_config` completes it, "" where it has none."""
        model = self._load(self._make_imports(version_dir, model_dir), path)
        if not hasattr(model, "auto_complete_config"):
            return ""
        try:
            completed = model.auto_complete_config(pb_utils.ModelConfig(json.loads(config_json)))
        except BaseException as error:
            if not hasattr(model, "definitions"):  # of a service file, nothing of this name is written there
                record_step(error, "auto_complete_config failed")
            raise
        if not isinstance(completed, pb_utils.ModelConfig):
            raise TritonModelException(
                "auto_complete_config function must return a valid pb.ModelConfig object, "
                f"got {type(completed).__name__}"
            )
        return json.dumps(completed.as_dict())

    def describe(self, path: str, template_json: str) -> str:
        """Return the models of a service file: complete configurations by name; of any other Python model none.

        Args:
            path: The file.
            template_json: What their configurations have in common.
        """
        folder = os.path.dirname(path)
        model = self._load(self._make_imports(folder, folder), path)
        described = {}
        for definition in getattr(model, "definitions", ()):
            config = pb_utils.ModelConfig({**json.loads(template_json), "name": definition.name})
            described[definition.name] = model.auto_complete_config(config).as_dict()
        return json.dumps(described)

    def finalize(self) -> None:
        """Let the model finalize, then cancel the tasks that it has left."""
        self._binding.is_serving = False
        loop, self._loop = self._loop, None
        try:
            if self._model is not None and hasattr(self._model, "finalize"):
                with _running(loop):
                    self._model.finalize()
        finally:
            if loop is not None:
                _close(loop)
            if self._imports is not None:
                self._imports.close()

    def wait(self, inbox: Inbox[Any]) -> None:
        """Return when the inbox holds something; meanwhile the tasks of an asynchronous model run."""
        if self._loop is None:
            self._host.wait(inbox)
        else:
            self._loop.run_until_complete(arrival(self._host, inbox))

    def readiness(self) -> bool | str:
        """Return the result of the model's `is_ready`, or an error text; True if it has no such method."""
        if not hasattr(self._model, "is_ready"):
            return True
        try:
            answer = self._model.is_ready()
            if hasattr(answer, "__await__"):
                answer = self._complete_coroutine(answer)
        except failures() as error:
            return describe(error)
        return answer if isinstance(answer, bool) else f"is_ready must return a bool, got {type(answer).__name__}"

    def execute(
        self, batch: ModelBatch, sent: Sequence[tuple[Fields, list[Tensor]]]
    ) -> tuple[list[Result | None], int]:
        """Run a batch.

        Args:
            batch: The batch.
            sent: Fields and inputs of each request.

        Returns:
            A result for each request, None where it was or will be answered through its sender; and the monotonic
            time in ns at which the model returned.
        """
        cls = self._request_class
        requests = []
        for index, (fields, inputs) in enumerate(sent):
            request = cls.__new__(cls)
            request._fields = fields
            request._inputs = inputs
            request._batch = batch
            request._index = index
            request._sender = None
            requests.append(request)
        if batch.refused is not None:
            return self._execute_others(batch, requests, batch.refused)
        return self._execute(batch, requests)

    def _execute_others(
        self, batch: ModelBatch, requests: list[InferenceRequest], refused: dict[int, Failure]
    ) -> tuple[list[Result | None], int]:
        """Run a batch without its refused requests."""
        others = [request for request in requests if request._index not in refused]
        results, output_start = self._execute(batch, others) if others else ([], time.monotonic_ns())
        answers = iter(results)
        return [refused[r._index] if r._index in refused else next(answers) for r in requests], output_start

    def _execute(self, batch: ModelBatch, requests: list[InferenceRequest]) -> tuple[list[Result | None], int]:
        binding = self._binding
        binding.running = batch.number
        try:
            returned = self._model.execute(requests.copy())
            if type(returned) is not list and hasattr(returned, "__await__"):
                if binding.is_decoupled:
                    self._start(batch, requests, returned)
                    return [None] * len(requests), time.monotonic_ns()
                returned = self._complete_coroutine(self._in_batch(batch.number, returned))
            output_start = time.monotonic_ns()
            if binding.is_decoupled:
                results = self._none(requests, returned)
            else:
                results = self._results(requests, returned, batch.rescheduled)
            if batch.rescheduled:
                self._reschedule(batch, requests, results)
        except failures() as error:
            if self._retries_alone and len(requests) > 1 and all(request._sender is None for request in requests):
                alone = [self._execute(batch, [request]) for request in requests]
                return [result for results, _ in alone for result in results], alone[-1][1]
            return self._failed(requests, error), time.monotonic_ns()
        finally:
            binding.running = 0
        return results, output_start

    def _load(self, imports: ModelImports, path: str, app: str = "") -> Any:
        loaded = self._loaded if self._loaded is not None else imports.load(path, app)
        if app:
            from .functions import ServiceCalls, log_to_server
            from .mount import MountedApp

            log_to_server(self._host)
            siblings = {definition.name: definition for definition in loaded[1]}
            return partial(MountedApp, loaded[0], ServiceCalls(self._request_class, siblings))
        if not isinstance(loaded, list):
            return loaded
        # Imported late: most models are classes themselves, and need none of it.
        from .functions import bound_to_file, log_to_server

        if not self._shares_process:
            log_to_server(self._host)
        return bound_to_file(loaded, self._host, self._request_class, self._complete_coroutine)

    def _make_imports(self, version_dir: str, model_dir: str) -> ModelImports:
        self._binding.model_dir = version_dir
        self._imports = ModelImports(version_dir, model_dir, self._pb_utils, self._shares_process)
        return self._imports

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop that runs in this thread while a coroutine is completed, and while `wait` waits."""
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        return self._loop

    def _complete_coroutine(self, coroutine: Awaitable[object]) -> object:
        return self._event_loop().run_until_complete(coroutine)

    async def _in_batch(self, number: int, coroutine: Awaitable[object]) -> object:
        """Complete the coroutine of a batch. Tasks that it creates belong to the batch, also during later ones."""
        self._binding.task_batch.set(number)
        return await coroutine

    def _results(
        self, requests: list[InferenceRequest], returned: object, rescheduled: set[int]
    ) -> list[Result | None]:
        if returned is None and all(request._sender is not None for request in requests):
            return [None] * len(requests)
        if not isinstance(returned, (list, tuple)):
            raise TritonModelException(
                f"Expected a list in the execute return, found type '{type(returned).__name__}'."
            )
        if len(returned) != len(requests):
            raise TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is: {len(requests)}, and InferenceResponse(s) size is: {len(returned)}"
            )
        for response in returned:
            if response is not None and not isinstance(response, InferenceResponse):
                raise TritonModelException(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response).__name__}'."
                )
        results: list[Result | None] = []
        for request, response in zip(requests, returned):
            if request._sender is not None and (response is None or not request._sender._close()):
                if response is not None:
                    self._log_second_answer(request)
                results.append(None)
            elif response is None:
                results.append(None if request._index in rescheduled else (TritonError.INTERNAL, _NO_SENDER))
            else:
                results.append(result_of(response, request._fields[6], self._binding))
        return results

    def _log_second_answer(self, request: InferenceRequest) -> None:
        text = "'execute' returned a response for request '{}', which its response sender had answered; it is dropped"
        self._host.log(pb_utils.Logger.WARNING, text.format(request.request_id()), __file__, 0)

    def _none(self, requests: list[InferenceRequest], returned: object) -> list[Result | None]:
        if returned is not None:
            raise TritonModelException(
                f"Python model '{self._host.name}' is using the decoupled mode and the execute function must return "
                f"None, found type '{type(returned).__name__}'."
            )
        for request in requests:
            request.get_response_sender()  # one that the model does not keep fails the request
        return [None] * len(requests)

    def _reschedule(self, batch: ModelBatch, requests: list[InferenceRequest], results: list[Result | None]) -> None:
        for place, request in enumerate(requests):
            if request._index not in batch.rescheduled:
                continue
            if results[place] is not None:
                results[place] = (TritonError.INTERNAL, _ANSWERED)
            elif request._sender is None or request._sender._close():
                results[place] = (RESCHEDULED, "")

    def _failed(self, requests: list[InferenceRequest], error: BaseException) -> list[Result | None]:
        """Report an exception; return the failure of the batch, for the requests that are not answered."""
        self._host.raised([request._fields[0] for request in requests], traced(error))
        text = f"Failed to process the request(s) for model '{self._host.name}', message: {describe(error)}"
        return [
            (TritonError.INTERNAL, text) if request._sender is None or request._sender._close() else None
            for request in requests
        ]

    def _start(self, batch: ModelBatch, requests: list[InferenceRequest], coroutine: Awaitable[object]) -> None:
        """Run the coroutine of a decoupled model beside those of other batches, while `wait` waits."""
        for request in requests:
            request.get_response_sender()
        task = self._event_loop().create_task(self._watched(batch, requests, coroutine))
        self._tasks.add(task)  # the loop itself has only weak references to tasks
        task.add_done_callback(self._tasks.discard)

    async def _watched(self, batch: ModelBatch, requests: list[InferenceRequest], coroutine: Awaitable[object]) -> None:
        try:
            results = self._none(requests, await coroutine)
            self._reschedule(batch, requests, results)
        except failures() as error:
            results = self._failed(requests, error)
        for request, result in zip(requests, results):
            if result is not None:
                self._host.respond(batch, request._index, result, True)


@contextlib.contextmanager
def _running(loop: asyncio.AbstractEventLoop | None) -> Iterator[None]:
    """Run a loop in another thread, so that code of this thread may wait for what it does."""
    if loop is None:
        yield
        return
    thread = threading.Thread(target=loop.run_forever, name="finalize", daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what the model has left behind in a loop, and close it."""
    import asyncio

    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


RETRY_ALONE = "RETRY_ALONE"
"""Model parameter: "true" runs each request of a batch alone when `execute` raises for the batch."""

_ANSWERED = "'execute' returned a response for a request that it rescheduled; it must return None for such a request"

_NO_SENDER = "'execute' returned None for the request, whose response sender it has not asked for"
