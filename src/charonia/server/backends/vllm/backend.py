"""The `vllm` backend: serves repositories of Triton's vLLM backend."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput
from charonia.config.parameters import LORA_ADAPTERS
from charonia.core.dtypes import DataType
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles
from charonia.server.backends.language.backend import LanguageBackend, version_text
from charonia.server.backends.language.signature import IMAGE, complete_language
from charonia.server.backends.vllm.options import (
    ARGUMENTS_FILE,
    LORAS_FILE,
    ROUTES,
    enables_loras,
    engine_arguments,
    engine_options,
    read_object,
    routes_of,
)

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
