"""The `llama_cpp` backend: serves GGUF files with llama.cpp."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.parameters import MAX_MODEL_LEN
from charonia.config.problems import raise_problems
from charonia.core.errors import ServingError, invalid
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles
from charonia.server.backends.language.backend import LanguageBackend
from charonia.server.backends.language.signature import complete_language
from charonia.server.backends.llama_cpp.gguf import MAGIC, read_header
from charonia.server.backends.llama_cpp.options import FILE, PARAMETERS, read_parameters
from charonia.server.backends.model_file import broken_file_hint, model_file

DEFAULT_FILE = "model.gguf"

_log = logging.getLogger(__name__)


class LlamaCppBackend(LanguageBackend):
    """The `llama_cpp` backend."""

    name = "llama_cpp"
    engine = Path(__file__).parent / "worker" / "engine.py"
    kind = InstanceKind.KIND_MODEL
    routes = ("chat/completions", "completions", "messages", "tokenize", "detokenize")

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        """Fill in inputs, outputs and instances; a model of embeddings has a route of its own."""
        parameters, length = await asyncio.to_thread(_described, files, config)
        routes = ("embeddings", "tokenize", "detokenize") if parameters.get("embedding") else self.routes
        if length:
            config = replace(config, parameters={MAX_MODEL_LEN: str(length), **config.parameters})
        return Completion(*complete_language(config, self.kind, routes))

    async def options(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Mapping[str, object]:
        """Return the file and the parameters of llama.cpp."""
        for sentence in PARAMETERS.remarks(config):
            _log.warning(sentence)
        return await asyncio.to_thread(_options, files, config)


def _parameters(files: ModelFiles, config: ModelConfig) -> dict[str, Any]:
    path = files.version_dir / FILE
    parameters, problems = read_parameters(config, path.read_bytes() if path.is_file() else None)
    if problems:
        raise_problems(config.name, problems)
    return parameters


def _described(files: ModelFiles, config: ModelConfig) -> tuple[dict[str, Any], int]:
    """Return the parameters of a model, and the tokens of context that a request can have, 0 if the file is broken."""
    parameters = _parameters(files, config)
    length: int = parameters.get("n_ctx") or 0
    if not length:
        with suppress(EOFError, OSError, KeyError, ValueError, ServingError):
            length = read_header(model_file(files, config, DEFAULT_FILE)).context_tokens
    is_shared = parameters.get("kv_unified", "n_parallel" not in parameters)
    return parameters, length if is_shared else length // parameters.get("n_parallel", 1)


def _options(files: ModelFiles, config: ModelConfig) -> dict[str, object]:
    path = model_file(files, config, DEFAULT_FILE)
    parameters = _parameters(files, config)
    if "mmproj" in parameters:
        projector = files.version_dir / parameters["mmproj"]
        if not projector.is_file():
            raise invalid(
                f"model '{config.name}': parameter mmproj: there is no file '{parameters['mmproj']}' in version "
                f"{files.version}"
            )
        parameters["mmproj"] = str(projector)
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start != MAGIC:
        raise invalid(
            f"model '{config.name}': '{path.name}' is no GGUF file: it begins with {start!r}, not {MAGIC!r}",
            hint=broken_file_hint(path) or "the file is broken, or of another format",
        )
    size = path.stat().st_size
    try:
        expected = read_header(path).size_bytes
    except EOFError:
        expected = size + 1
    except KeyError:  # llama.cpp knows more types of values than this server
        expected = 0
    if size < expected:
        needed = f"at least {expected:,} bytes" if expected > size + 1 else "more than its header"
        raise invalid(
            f"model '{config.name}': '{path.name}' is truncated: expected {needed}, got {size:,} bytes",
            hint="download or copy it again",
        )
    return {"path": str(path), "parameters": parameters}
