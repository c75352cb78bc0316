"""Batching strategies in Python: a file in the model's folder that decides which requests share a batch.

The parameter `BATCHING_STRATEGY` of a model names the file. Its functions are those of Triton's C interface for custom
batching; all but `batch_include_request` may be left out:

- `batcher_initialize(config) -> batcher`: the model is loaded; `config` is its configuration as a dictionary.
- `batch_initialize(batcher) -> batch`: a batch is begun. Without it `batch` is an empty dictionary.
- `batch_include_request(request, batch) -> bool`: whether a `StrategyRequest` joins the batch.
- `batch_finalize(batch)`: the batch is sent, or is composed anew.
- `batcher_finalize(batcher)`: the model is unloaded.

They run on the event loop's thread and block it. When one raises, the request is answered with an error.
"""

import logging
import runpy
from collections.abc import Callable, Mapping

from charonia.config.json_form import to_json
from charonia.config.model import ModelConfig
from charonia.config.parameters import PYTHON_STRATEGY
from charonia.core.errors import invalid
from charonia.core.request import InferRequest, ParameterValue
from charonia.core.tensor import Array
from charonia.server.execution.in_flight import PendingRequest
from charonia.server.lifecycle.repository.scan import ModelFolder, is_inside
from charonia.server.scheduling.dynamic import JoinDecision

LIBRARY = "batchstrategy.so"
"""A strategy that Triton takes from a model's or a version's folder."""

INCLUDE = "batch_include_request"
_OTHERS = ("batcher_initialize", "batch_initialize", "batch_finalize", "batcher_finalize")

_log = logging.getLogger(__name__)

Function = Callable[..., object]


class StrategyRequest:
    """A request as a strategy sees it.

    Attributes:
        id: The caller's request id, "" for none.
        batch_size: Batch elements that it brings.
        priority: Priority asked for, 0 for none.
        parameters: Its custom parameters.
        inputs: Its arrays by name, not to be changed.
    """

    __slots__ = ("batch_size", "id", "inputs", "parameters", "priority")

    def __init__(self, request: InferRequest, batch_size: int) -> None:
        self.id = request.id
        self.batch_size = batch_size
        self.priority = request.priority
        self.parameters: Mapping[str, ParameterValue] = request.parameters
        self.inputs: Mapping[str, Array] = {name: tensor.array for name, tensor in request.inputs.items()}


class PythonStrategy:
    """The strategy of one loaded version; a call begins a batch. See `server.scheduling.dynamic.Strategy`.

    Attributes:
        entry_of: Returns the request with an id of the scheduler; set by the owner of the scheduler.
    """

    def __init__(self, functions: Mapping[str, Function], config: ModelConfig) -> None:
        self._subject = f"the batching strategy of model '{config.name}'"
        self._functions = {name: functions[name] for name in (INCLUDE, *_OTHERS) if name in functions}
        self.entry_of: Callable[[int], PendingRequest] | None = None
        initialize = self._functions.get("batcher_initialize")
        self._batcher = initialize(to_json(config)) if initialize is not None else None

    def __call__(self) -> "PythonBatchBuilder":
        return PythonBatchBuilder(self)

    def close(self) -> None:
        """Tell the strategy that the model is unloaded."""
        finalize = self._functions.get("batcher_finalize")
        if finalize is not None:
            self.guarded(finalize, self._batcher)

    def begin(self) -> object:
        """Return the strategy's state of a new batch."""
        initialize = self._functions.get("batch_initialize")
        return initialize(self._batcher) if initialize is not None else {}

    def includes(self, id: int, batch: object) -> bool:
        """Whether the strategy lets a request join the batch."""
        if self.entry_of is None:
            raise RuntimeError("entry_of is not set")
        entry = self.entry_of(id)
        return bool(self._functions[INCLUDE](StrategyRequest(entry.request, entry.batch_size), batch))

    def end(self, batch: object) -> None:
        """Tell the strategy that a batch is over."""
        finalize = self._functions.get("batch_finalize")
        if finalize is not None:
            self.guarded(finalize, batch)

    def guarded(self, function: Function, argument: object) -> None:
        """Call a function whose failure concerns no request."""
        try:
            function(argument)
        except Exception:  # foreign code
            _log.exception("%s failed in %s", self._subject, getattr(function, "__name__", function))

    def failed(self) -> None:
        """Log that it failed on a request. To be called in an except block."""
        _log.exception("%s failed on a request", self._subject)


class PythonBatchBuilder:
    """One batch. See `server.scheduling.dynamic.BatchBuilder`."""

    def __init__(self, strategy: PythonStrategy) -> None:
        self._strategy = strategy
        self._batch: object = None
        self._has_begun = False

    def take(self, id: int) -> JoinDecision:
        """Ask the strategy whether a request joins the batch."""
        try:
            if not self._has_begun:
                self._batch = self._strategy.begin()
                self._has_begun = True
            return JoinDecision.JOINS if self._strategy.includes(id, self._batch) else JoinDecision.STAYS_OUT
        except Exception:  # foreign code
            self._strategy.failed()
            return JoinDecision.FAILED

    def end(self) -> None:
        if self._has_begun:
            self._strategy.end(self._batch)


def load_strategy(folder: ModelFolder, version: int, config: ModelConfig) -> PythonStrategy | None:
    """Return the strategy of a model, None where it has none. Reads files, and runs the model's code.

    Raises:
        ServingError: INVALID_ARG: the file does not exist, is not a strategy, or failed.
    """
    name = config.parameters.get(PYTHON_STRATEGY)
    where = f"model '{config.name}': parameters[{PYTHON_STRATEGY}]"
    if name is None:
        for path in (folder.path / LIBRARY, folder.path / str(version) / LIBRARY):
            if path.is_file() and config.dynamic_batching is not None:
                raise invalid(
                    f"model '{config.name}': a batching strategy from a library, {path}, is not available here",
                    hint=f"write it in Python and name it in the parameter {PYTHON_STRATEGY}",
                )
        return None
    if config.dynamic_batching is None or config.max_batch_size < 1:
        raise invalid(f"{where}: a batching strategy needs dynamic_batching and a max_batch_size of at least 1")
    if not is_inside(name):
        raise invalid(f"{where}: must be a path within the model's folder, got '{name}'")
    file = folder.path / name
    if not file.is_file():
        raise invalid(f"{where}: there is no file '{name}' in the model's folder")
    try:
        found = runpy.run_path(str(file), run_name=f"charonia_batching_strategy_{config.name}")
    except Exception as error:  # foreign code
        raise invalid(f"{where}: '{name}' cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found.get(INCLUDE)):
        raise invalid(f"{where}: '{name}' has no function {INCLUDE}(request, batch)")
    try:
        return PythonStrategy(found, config)
    except Exception as error:  # foreign code
        raise invalid(f"{where}: batcher_initialize failed: {type(error).__name__}: {error}") from error
