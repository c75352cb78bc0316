"""Options of a model of vLLM, from its parameters and the files of Triton's vLLM backend. Pure.

Source: the documentation of Triton's vLLM backend.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.server.backends.language.signature import arguments_of, gpu_lists
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
    given = arguments_of(config, ())
    return read_object(config.name, ARGUMENTS_FILE, text) | given, sorted(given)


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
