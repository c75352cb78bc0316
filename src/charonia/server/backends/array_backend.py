"""Base of backends whose library takes and returns arrays: options, file, completion, errors, and batching.

A subclass inspects and opens models. Its instances are `ArrayInstance`. If a batch fails, the library does not say
whose fault it is, so each request is run again alone.
"""

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Generic, TypeVar

from charonia.config.backends import record_of
from charonia.config.complete import Signature, merge_signature
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.problems import Problem, check_problems
from charonia.core.errors import Code, ServingError, internal, invalid, unsupported
from charonia.core.request import InferRequest
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Array
from charonia.server.backends.api import (
    BackendSettings,
    Completion,
    Execution,
    LoadedModel,
    ModelFiles,
    Outputs,
    Result,
)
from charonia.server.backends.batch import batch_sizes, gather, input_plans, output_plans, scatter, tensors_of
from charonia.server.backends.parameters import Params
from charonia.server.machine.memory import release_freed_memory


class BatchInstance(ABC):
    """A `BlockingInstance` that computes a batch as a whole.

    Attributes:
        problem: Why it can compute no longer, "" while it can.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.is_batched = config.max_batch_size > 0
        self.inputs = input_plans(config)
        self.outputs = output_plans(config)
        self.names = tuple(plan.name for plan in self.outputs)
        self._by_name = {plan.name: plan for plan in self.outputs}
        self.is_closed = False
        self.problem = ""

    @abstractmethod
    def _execute(self, requests: Sequence[InferRequest]) -> Execution: ...

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        """Run the requests as one batch; if it fails, each one alone, so that a bad request fails alone.

        Where memory is exhausted, there is no other attempt.
        """
        if len(requests) == 1 or self.is_batched:
            try:
                return self._execute(requests)
            except ServingError as error:
                if len(requests) == 1 or error.code is Code.UNAVAILABLE or self.problem:
                    raise
        start = time.monotonic_ns()
        results = [self._execute_alone(request) for request in requests]
        return Execution(results, start, time.monotonic_ns())

    def close(self) -> None:
        """Run nothing more. A library's own resources are released by the class that holds them."""
        self.is_closed = True

    def _execute_alone(self, request: InferRequest) -> Result:
        try:
            return self._execute([request]).results[0]
        except ServingError as error:
            return error

    def _wanted(self, requests: Sequence[InferRequest]) -> tuple[str, ...]:
        """Return the outputs that at least one request asks for; a model need not compute the others."""
        if len(self.names) == 1:
            return self.names
        asked: set[str] = set()
        for request in requests:
            if not request.outputs:
                return self.names
            asked.update(output.name for output in request.outputs)
        return tuple(name for name in self.names if name in asked)


class ArrayInstance(BatchInstance):
    """An instance whose model is one call, `run`."""

    @abstractmethod
    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        """Run the model once.

        Args:
            names: The requested outputs.
            feed: Array of each input that is given, in the model's own shape; BYTES as objects of `bytes`.

        Returns:
            The array of each output in `names`, in their order; no later call may change it.

        Raises:
            ServingError: The model failed.
        """

    def feed(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        """Return the array of each input that the requests give."""
        feed = {}
        for plan in self.inputs:
            array = gather(requests, plan.name)
            if array is not None:
                feed[plan.name] = plan.reshape(array, self.is_batched)
        return feed

    def parts(self, name: str, array: Array, requests: Sequence[InferRequest]) -> list[Array]:
        """Return each request's part of an output, in the configured shape."""
        array = self._by_name[name].reshape(array, self.is_batched)
        return scatter(name, array, batch_sizes(requests)) if self.is_batched else [array]

    def _execute(self, requests: Sequence[InferRequest]) -> Execution:
        if self.is_closed:
            raise internal("the instance is closed")
        feed = self.feed(requests)
        names = self._wanted(requests)
        input_end_ns = time.monotonic_ns()
        arrays = self.run(names, feed)
        output_start_ns = time.monotonic_ns()
        columns = [
            tensors_of(name, self._by_name[name].datatype, self.parts(name, array, requests))
            for name, array in zip(names, arrays, strict=True)
        ]
        answers = map(list, zip(*columns, strict=True) if columns else repeat((), len(requests)))
        return Execution(list(map(Outputs, answers)), input_end_ns, output_start_ns)


Opened = TypeVar("Opened")


class SharingModel:
    """A loaded version whose instances share what the first of them opens.

    Attributes:
        usage: The memory that it takes, as far as it is known.
    """

    def __init__(self) -> None:
        self.usage: list[MemoryUsage] = []
        self._opened: dict[Hashable, asyncio.Task[Any]] = {}

    async def shared(self, key: Hashable, opens: Callable[[], Coroutine[Any, Any, Opened]]) -> Opened:
        """Return what `opens` returns, which is called for the first instance with a key."""
        if key not in self._opened:
            self._opened[key] = asyncio.create_task(opens())
        found: Opened = await asyncio.shield(self._opened[key])
        return found

    def memory(self) -> list[MemoryUsage]:
        return list(self.usage)

    async def aclose(self) -> None:
        """Release what the instances shared, and return its memory to the system."""
        self._opened.clear()
        await asyncio.to_thread(release_freed_memory)


_STARTS = (
    (b"version https://git-lfs", "the file is a Git LFS pointer: `git lfs pull` fetches the model"),
    (b"<!doctype html", "the file is an HTML page: the download needed a login, or the link leads to a page"),
    (b"<html", "the file is an HTML page: the download needed a login, or the link leads to a page"),
    (b"\x1f\x8b", "the file is compressed with gzip: gunzip unpacks it"),
)
"""What files begin with that are not models, in lower case, and the hint."""


def named_path(files: ModelFiles, config: ModelConfig, default: str) -> Path:
    """Return the path of the file or folder that a configuration names, of the default where it names none.

    Raises:
        ServingError: INVALID_ARG when it is outside of the version's folder.
    """
    name = config.default_model_filename or default
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise invalid(f"default_model_filename: must stay within the version's folder, got '{name}'")
    return files.version_dir / name


def no_file(files: ModelFiles, config: ModelConfig, path: Path, kind: str = "file", hint: str = "") -> ServingError:
    """Return the error for a version without a file; the default hint lists what its folder has."""
    folder = path.parent
    found = sorted(each.name for each in folder.glob("*")) if folder.is_dir() else []
    held = f"the folder holds {', '.join(found[:10]) or 'nothing'}"
    if path.is_symlink():
        held = f"it is a link to '{path.readlink()}', which is not there"
    elif folder == files.version_dir:
        held += "; `default_model_filename` names another file"
    return invalid(
        f"model '{config.name}' version {files.version} has no {kind} {path.relative_to(files.model_dir)}",
        hint=hint or held,
    )


def model_file(files: ModelFiles, config: ModelConfig, default: str) -> Path:
    """Return the model's file, or where that is a folder, the file in it: of the same name, or of the default name.

    Raises:
        ServingError: INVALID_ARG when there is none.
    """
    path = named_path(files, config, default)
    candidates = [path / path.name, path / default] if path.is_dir() else [path]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise no_file(files, config, candidates[0])
    return found


def broken_file_hint(path: Path) -> str:
    """Return a hint for a file that a library does not load, "" for none. Blocks on disk I/O."""
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip().lower()
    except OSError:
        return ""
    if not start:
        return "the file is empty"
    return next((hint for beginning, hint in _STARTS if start.startswith(beginning)), "")


def load_error(path: Path, error: Exception, hints: Mapping[str, str], *sources: re.Pattern[str]) -> ServingError:
    """Return the error for a file that a library does not load.

    Args:
        hints: Hint by a part of the library's message.
        sources: As for `plain_error`.
    """
    refused = plain_error(f"cannot load {path.name}", error, Code.INVALID_ARG, *sources)
    refused.message = refused.message.replace(str(path), str(path.resolve()))  # of a link: where the user has the file
    refused.hint = broken_file_hint(path) or next((hints[text] for text in hints if text in refused.message), "")
    return refused


def weights_bytes(path: Path) -> int:
    """Return the total size of a model's file and those beside it, which hold external data. Blocks on disk I/O."""
    return sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file())


_log = logging.getLogger(__name__)

_MESSAGE_CHARS_MAX = 1000

Plan = TypeVar("Plan")
Model = TypeVar("Model", bound=LoadedModel)


class PlannedBackend(ABC, Generic[Plan, Model]):
    """A backend whose models have options, which their configuration and the settings give.

    Attributes:
        runs_on_gpus: Whether it has instances of KIND_GPU.
        gpu_hint: Hint for models that ask for them where it has none.
    """

    name: str
    parameters: ClassVar[Params]
    runs_on_gpus: ClassVar[bool] = False
    gpu_hint: ClassVar[str] = "use instances of KIND_CPU"

    @abstractmethod
    def read_plan(self, config: ModelConfig, settings: Mapping[str, str]) -> tuple[Plan, list[Problem]]:
        """Return the options of a model, and all problems of its parameters and of the backend's settings."""

    @abstractmethod
    async def open(self, files: ModelFiles, config: ModelConfig, plan: Plan, settings: BackendSettings) -> Model:
        """Load a version."""

    def uses_gpus(self) -> bool:
        return False

    def plan(self, config: ModelConfig, settings: BackendSettings) -> Plan:
        """Return the options of a model. Raises ServingError: A parameter or a setting is invalid."""
        plan, problems = self.read_plan(config, settings.values)
        check_problems(config.name, problems)
        return plan

    def remarks(self, config: ModelConfig, settings: Mapping[str, str]) -> Iterator[str]:
        """Yield a warning for each parameter that is unknown or has no effect."""
        yield from self.parameters.remarks(config)

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Model:
        plan = self.plan(config, settings)
        if not self.runs_on_gpus and any(group.kind is InstanceKind.KIND_GPU for group in config.instance_group):
            raise unsupported(
                f"model '{config.name}': the {self.name} backend has no instances of KIND_GPU", hint=self.gpu_hint
            )
        for sentence in self.remarks(config, settings.values):
            _log.warning(sentence)
        return await self.open(files, config, plan, settings)

    async def aclose(self) -> None: ...


class ArrayBackend(PlannedBackend[Plan, Model]):
    """A backend that completes configurations from the signature of a model."""

    @abstractmethod
    async def inspect(self, files: ModelFiles, config: ModelConfig, plan: Plan) -> tuple[Signature, Sequence[str]]:
        """Return the inputs and outputs of a model, and notes."""

    def path(self, files: ModelFiles, config: ModelConfig) -> Path:
        """Return the file of a model: one of the record's forms, unless the configuration names another.

        Raises:
            ServingError: The file does not exist.
        """
        names = [form.filename for form in record_of(self.name).forms]
        return model_file(files, config, next((n for n in names if (files.version_dir / n).is_file()), names[0]))

    def batch_size(self, settings: BackendSettings) -> int:
        """Return the default of `max_batch_size` for models that can batch."""
        return settings.default_max_batch_size

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        if config.input and config.output:
            return Completion(config)
        signature, remarks = await self.inspect(files, config, self.plan(config, settings))
        size = self.batch_size(settings)
        merged, notes = merge_signature(config, signature, default_max_batch_size=size)
        return Completion(merged, (*notes, *remarks))


def inputs_hint(feed: Mapping[str, Array]) -> str:
    """Return a hint for a library that fails on inputs."""
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
    return f"the inputs were {shapes}; a network may need other sizes than its signature says"


def decoded(name: str, array: Array, library: str) -> list[str]:
    """Return the bytes of an input as text, for libraries that take only that."""
    texts = []
    for index, element in enumerate(array.reshape(-1).tolist()):
        try:
            texts.append(element.decode())
        except UnicodeDecodeError as error:
            raise invalid(
                f"input '{name}': element {index} is not UTF-8 (byte {error.start} is 0x{element[error.start]:02x}), "
                f"which is what {library} takes as a string",
                hint="send binary data as UINT8",
            ) from None
    return texts


def plain_error(what: str, error: Exception, code: Code, *sources: re.Pattern[str]) -> ServingError:
    """Return an error of a library as one line.

    Args:
        sources: Patterns to remove from the message, such as locations in the library's source.
    """
    text = str(error)
    for source in sources:
        text = source.sub("", text)
    return ServingError(code, f"{what}: {' '.join(text.split())[:_MESSAGE_CHARS_MAX]}")
