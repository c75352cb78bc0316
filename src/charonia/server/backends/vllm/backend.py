"""The `vllm` backend: serves repositories of Triton's vLLM backend."""

import asyncio
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput
from charonia.config.parameters import LORA_ADAPTERS
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles
from charonia.server.backends.language.backend import (
    IMAGE,
    LanguageBackend,
    arguments_of,
    complete_language,
    gpu_lists,
    version_text,
)
from charonia.server.backends.parameters import Param, Params

ARGUMENTS_FILE = "model.json"
"""File of a version: arguments of vLLM's engine, and of its server, by name."""

LORAS_FILE = "multi_lora.json"
"""File of a version: folder of each LoRA adapter, by the adapter's name."""

METRICS = "REPORT_CUSTOM_METRICS"

PARAMETERS = Params(
    "vllm",
    Param(METRICS, kind=bool, default=True),
    Param("ENABLE_VLLM_HEALTH_CHECK", kind=bool),  # no effect: the health of the engine is always watched
)

GPU_DEVICE_IDS = "GPU_DEVICE_IDS"
"""Model parameter: the GPUs of a KIND_MODEL instance, separated by commas."""

VARIABLE = "VLLM_"
"""Model parameters whose names begin so are environment variables of vLLM."""

_TOKENS = ("tokenize", "detokenize")
ROUTES = ("chat/completions", "completions", "embeddings", "responses", "messages", *_TOKENS)
"""Routes that vLLM answers, as far as the model can."""

POOLING_ROUTES = ("embeddings", "rerank", "score", *_TOKENS)
"""Routes of a model that generates no text."""

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")


def engine_options(config: ModelConfig, arguments_text: str, loras_text: str | None) -> dict[str, object]:
    """Return what the worker needs to know.

    Args:
        loras_text: Content of `multi_lora.json`, None where there is none.

    Raises:
        ServingError: INVALID_ARG for a file or a parameter that is wrong.
    """
    arguments, of_parameters = engine_arguments(config, arguments_text)
    if not isinstance(arguments.get("model"), str):
        raise invalid(
            f"model '{config.name}': {ARGUMENTS_FILE}: expected `model`, the name or folder of a model, "
            f"got {arguments.get('model')!r}"
        )
    has_loras = enables_loras(arguments)
    if "enable_lora" in arguments:
        arguments["enable_lora"] = has_loras
    loras: dict[str, Any] = {}
    if has_loras:
        if loras_text is None:
            raise invalid(
                f"model '{config.name}': {ARGUMENTS_FILE} enables LoRA, but the version has no {LORAS_FILE}",
                hint='it has the form {"name of an adapter": "its folder"}',
            )
        loras = read_object(config.name, LORAS_FILE, loras_text)
    return {
        "arguments": arguments,
        "of_parameters": of_parameters,
        "variables": {name: text for name, text in config.parameters.items() if name.startswith(VARIABLE)},
        "loras": loras,
        "gpus": _gpus(config, arguments),
        "metrics": PARAMETERS.checked(config)[METRICS],
    }


def engine_arguments(config: ModelConfig, text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of the engine, and the names of those that the configuration's parameters give.

    Args:
        config: The configuration; its parameters take precedence.

    Raises:
        ServingError: INVALID_ARG: the file holds no JSON object.
    """
    arguments = arguments_of(config, ())
    return read_object(config.name, ARGUMENTS_FILE, text) | arguments, sorted(arguments)


def enables_loras(arguments: Mapping[str, Any]) -> bool:
    """Return whether a model with these arguments has LoRA adapters; Triton's examples have "true" as text."""
    return str(arguments.get("enable_lora", False)).lower() == "true"


def routes_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return OpenAI's routes of a model with these arguments: one that pools generates no text."""
    return POOLING_ROUTES if arguments.get("runner") == "pooling" else ROUTES


def read_object(model: str, file: str, text: str) -> dict[str, Any]:
    """Return the members of a JSON file. Raises ServingError: INVALID_ARG: it holds no JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise invalid(f"model '{model}': {file} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid(f"model '{model}': {file}: expected a JSON object, got {text.strip()[:50]!r}")
    return found


def _gpus(config: ModelConfig, arguments: Mapping[str, Any]) -> str:
    lists = gpu_lists(config, GPU_DEVICE_IDS, "commas")
    if len(lists) > 1:
        raise invalid(f"model '{config.name}': parameter {GPU_DEVICE_IDS}: expected one list, got {len(lists)}")
    numbers = lists[0] if lists else []
    sizes = [arguments.get(name, 1) for name in _PARALLEL]
    if not all(type(size) is int for size in sizes):
        raise invalid(f"model '{config.name}': {' and '.join(_PARALLEL)}: expected whole numbers, got {sizes}")
    needed = math.prod(sizes)
    if numbers and needed > 1 and len(numbers) != needed:
        raise invalid(
            f"model '{config.name}': parameter {GPU_DEVICE_IDS}: expected {needed} GPUs, as many as "
            f"tensor_parallel_size times pipeline_parallel_size, got {len(numbers)}"
        )
    return ",".join(numbers)


EMBEDDING = ModelInput("embedding_request", DataType.BYTES, dims=(1,), optional=True)
"""The request of Triton's OpenAI front end for an embedding, as JSON text."""


class VllmBackend(LanguageBackend):
    """The `vllm` backend."""

    name = "vllm"
    engine = Path(__file__).parent / "worker" / "engine.py"
    kind = InstanceKind.KIND_MODEL
    routes = ROUTES
    more_inputs = (IMAGE, EMBEDDING)

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        """Fill in inputs, outputs and instances; a model of embeddings has a route of its own.

        Raises:
            ServingError: INVALID_ARG: the arguments of the engine cannot be read.
        """
        arguments, adapters = await asyncio.to_thread(_arguments, files, config)
        if adapters:  # by which OpenAI's clients name the model
            config = replace(config, parameters={LORA_ADAPTERS: ",".join(adapters), **config.parameters})
        return Completion(*complete_language(config, self.kind, routes_of(arguments), self.more_inputs))

    async def options(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Mapping[str, object]:
        return await asyncio.to_thread(lambda: engine_options(config, _text(files, config), _loras(files, config)))


def _arguments(files: ModelFiles, config: ModelConfig) -> tuple[dict[str, Any], Iterable[str]]:
    """Return the arguments of the engine, and the names of the adapters."""
    arguments, _ = engine_arguments(config, _text(files, config))
    text = _loras(files, config) if enables_loras(arguments) else None
    return arguments, read_object(config.name, LORAS_FILE, text) if text is not None else ()


def _text(files: ModelFiles, config: ModelConfig) -> str:
    hint = 'it holds arguments of vLLM\'s engine: {"model": "name or folder of a model"}'
    return version_text(files, config, ARGUMENTS_FILE, hint)


def _loras(files: ModelFiles, config: ModelConfig) -> str | None:
    has_some = (files.version_dir / LORAS_FILE).exists()
    return version_text(files, config, LORAS_FILE, "") if has_some else None
