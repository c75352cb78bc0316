"""A backend of language models: completes configurations, and loads an engine into a worker process.

Any model with an input `text_input` and an output `text_output`, both of strings, counts as a language model.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import orjson

from charonia.config.backends import record_of
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from charonia.config.parameters import (
    EXAMPLE,
    OPENAI_ROUTES,
    REQUESTS_MAX,
    SERVER_PARAMETERS,
    TEXT_INPUT,
    TEXT_OUTPUT,
)
from charonia.config.problems import Problem, check_problems
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid, unsupported
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.python.environment import ENVIRONMENT, environment_of
from charonia.server.backends.registry import install_hint
from charonia.server.backends.workers.model import START_SECONDS, PythonModel
from charonia.server.backends.workers.process import SERVER_ENVIRONMENT, Environment
from charonia.server.backends.workers.services import ServerServices
from charonia.server.channel.cuda_driver import is_usable
from charonia.server.machine.private_folder import PrivateFolder

_WORDS = {"true": True, "false": False}


def arguments_of(config: ModelConfig, others: Collection[str]) -> dict[str, Any]:
    """Return the parameters that belong to the engine, by name: those in lower case.

    A value is read as JSON, and is text where it is none: `8`, `0.5`, `true`, `{"a": 1}`, `auto`.

    Args:
        others: Names in lower case that are the backend's own.
    """
    left_out = {*SERVER_PARAMETERS, START_SECONDS, ENVIRONMENT, *others}
    return {
        name: _value(text) for name, text in config.parameters.items() if name == name.lower() and name not in left_out
    }


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def gpu_lists(config: ModelConfig, parameter: str, separators: str) -> list[list[str]]:
    """Return the GPUs of each instance that a parameter names, "0,1;2,3"; [] where it names none.

    Raises:
        ServingError: INVALID_ARG for others than numbers, each once.
    """
    text = config.parameters.get(parameter, "")
    lists = [[number.strip() for number in numbers.split(",")] for numbers in text.split(";")] if text else []
    numbers = [number for each in lists for number in each]
    if not all(number.isascii() and number.isdigit() for number in numbers) or len(set(numbers)) < len(numbers):
        raise invalid(
            f"model '{config.name}': parameter {parameter}: expected numbers of GPUs, each once, separated by "
            f"{separators}, got '{text}'"
        )
    return lists


RETURNS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
"""Outputs that a request gets if its input `return_<name>` is true."""

_INPUTS = (
    ModelInput(TEXT_INPUT, DataType.BYTES, dims=(1,)),
    ModelInput("stream", DataType.BOOL, dims=(1,), optional=True),
    ModelInput("sampling_parameters", DataType.BYTES, dims=(1,), optional=True),
    ModelInput("exclude_input_in_output", DataType.BOOL, dims=(1,), optional=True),
    *(ModelInput(f"return_{name}", DataType.BOOL, dims=(1,), optional=True) for name in RETURNS),
)

IMAGE = ModelInput("image", DataType.BYTES, dims=(-1,), optional=True)
"""Images of a request, as files in base64; for engines that take some."""

_EXAMPLE = json.dumps(
    {"text_input": "The capital of France is", "stream": True, "sampling_parameters": {"max_tokens": 32}}
)

_OUTPUTS = (
    ModelOutput(TEXT_OUTPUT, DataType.BYTES, dims=(-1,)),
    ModelOutput("finish_reason", DataType.BYTES, dims=(-1,)),
    ModelOutput("cumulative_logprob", DataType.FP32, dims=(-1,)),
    ModelOutput("logprobs", DataType.BYTES, dims=(-1,)),
    ModelOutput("num_input_tokens", DataType.UINT32, dims=(1,)),
    ModelOutput("num_output_tokens", DataType.UINT32, dims=(-1,)),
)


def complete_language(
    config: ModelConfig,
    kind: InstanceKind,
    routes: Sequence[str],
    more_inputs: Sequence[ModelInput] = (),
    more_outputs: Sequence[ModelOutput] = (),
) -> tuple[ModelConfig, tuple[str, ...]]:
    """Fill in what the configuration of a language model leaves open; return it with notes.

    Args:
        kind: Kind of the instances, where none are given; one instance is enough for any number of requests.
        routes: OpenAI's routes that the engine answers itself.
        more_inputs: Inputs that this engine takes besides those of all.
        more_outputs: Outputs that it has besides those of all.
    """
    notes = []
    if not config.input:
        config = replace(config, input=(*_INPUTS, *more_inputs))
        notes.append(f"inputs: {TEXT_INPUT} and the options of language models")
    if not config.output:
        config = replace(config, output=(*_OUTPUTS, *more_outputs))
        notes.append(f"outputs: {TEXT_OUTPUT} and what a request may ask for besides")
    if config.model_transaction_policy is None:
        config = replace(config, model_transaction_policy=TransactionPolicy(decoupled=True))
        notes.append("decoupled: a request that streams has many responses")
    if not config.instance_group:
        config = replace(config, instance_group=(InstanceGroup(kind=kind, count=1),))
        notes.append("one instance: its engine batches by itself")
    config = replace(config, parameters={OPENAI_ROUTES: ",".join(routes), EXAMPLE: _EXAMPLE, **config.parameters})
    return config, tuple(notes)


def language_problems(
    config: ModelConfig, more_inputs: Sequence[ModelInput] = (), more_outputs: Sequence[ModelOutput] = ()
) -> Iterator[Problem]:
    """Yield what a configuration asks for that no engine can meet."""
    if config.max_batch_size > 0:
        yield Problem("max_batch_size", f"expected 0: the engine batches by itself, got {config.max_batch_size}")
    if config.model_transaction_policy is None or not config.model_transaction_policy.decoupled:
        yield Problem("model_transaction_policy.decoupled", "expected true: a request that streams has many responses")
    most = config.parameters.get(REQUESTS_MAX, "1")
    if not (most.isascii() and most.isdigit() and int(most) > 0):
        yield Problem(f"parameters[{REQUESTS_MAX}]", f"expected a whole number of at least 1, got '{most}'")
    all_known: tuple[ModelInput | ModelOutput, ...] = (*_INPUTS, *more_inputs, *_OUTPUTS, *more_outputs)
    known = {tensor.name: tensor.data_type for tensor in all_known}
    sides: tuple[tuple[str, Sequence[ModelInput | ModelOutput], str], ...] = (
        ("input", config.input, TEXT_INPUT),
        ("output", config.output, TEXT_OUTPUT),
    )
    for kind, tensors, needed in sides:
        names = [tensor.name for tensor in tensors]
        if needed not in names:
            yield Problem(kind, f"expected '{needed}' among them, got {', '.join(names)}")
        for index, tensor in enumerate(tensors):
            datatype = known.get(tensor.name, tensor.data_type if kind == "input" else None)
            if datatype is None:
                yield Problem(f"{kind}[{index}].name", f"the model has no {kind} '{tensor.name}'")
            elif tensor.data_type is not datatype:
                got = tensor.data_type.config if tensor.data_type is not None else "none"
                yield Problem(f"{kind}[{index}].data_type", f"expected {datatype.config}, got {got}")


_MODEL = Path(__file__).parent / "worker" / "model.py"


class LanguageBackend(ABC):
    """What a backend of language models derives from.

    Each instance is an engine in a worker process, which is started again when it ends. An environment of its own is
    named or described as for Python models.

    Attributes:
        engine: File with the class `Engine`, for the worker: `worker/model.py` says what that class has.
        kind: Kind of the instances where the configuration names none.
        routes: OpenAI's routes that the engine answers itself.
        more_inputs: Inputs that this engine takes besides those of all.
        more_outputs: Outputs that it has besides those of all.
    """

    name: ClassVar[str]
    engine: ClassVar[Path]
    kind: ClassVar[InstanceKind] = InstanceKind.KIND_AUTO
    routes: ClassVar[Sequence[str]] = ("chat/completions", "completions")
    more_inputs: ClassVar[Sequence[ModelInput]] = ()
    more_outputs: ClassVar[Sequence[ModelOutput]] = ()

    def uses_gpus(self) -> bool:
        """Return True: whether to use the GPU is up to the engine."""
        return True

    @abstractmethod
    async def options(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Mapping[str, object]:
        """Return what the engine needs to know of a version; it is handed to the worker as JSON."""

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        return Completion(*complete_language(config, self.kind, self.routes, self.more_inputs, self.more_outputs))

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> PythonModel:
        check_problems(config.name, language_problems(config, self.more_inputs, self.more_outputs))
        environment = await self._environment(files, config, settings)
        options = orjson.dumps(dict(await self.options(files, config, settings))).decode()
        await asyncio.to_thread(is_usable)  # starting the driver takes a while; the result is cached
        server = ServerServices.of(config.name, files.version, settings)
        sockets = PrivateFolder()

        def arguments(placement: Placement) -> dict[str, str]:
            own = {"threads": str(placement.threads), "folder": str(sockets.path)}
            return {"engine": str(self.engine), "options": options, **own}

        closing = partial(asyncio.to_thread, sockets.remove)
        return PythonModel(files, config, _MODEL, environment, server, arguments, closing=closing)

    async def aclose(self) -> None:  # noqa: B027 # some have something to do
        """Do nothing: models share nothing."""

    async def _environment(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Environment:
        environment = await environment_of(files, config, settings)
        for package in record_of(self.name).packages:
            if environment == SERVER_ENVIRONMENT and not package.optional and find_spec(package.module) is None:
                raise unsupported(
                    f"model '{config.name}' needs the package '{package.module}', which is not installed",
                    hint=install_hint(package),
                )
        return environment


def version_text(files: ModelFiles, config: ModelConfig, name: str, hint: str) -> str:
    """Return the content of a file that a version must have; `hint` describes the file. Blocks on disk I/O.

    Raises:
        ServingError: INVALID_ARG: it is missing, or cannot be read.
    """
    try:
        return (files.version_dir / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise invalid(f"model '{config.name}' version {files.version} has no file {name}", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(f"model '{config.name}': {name} cannot be read: {error}") from None
