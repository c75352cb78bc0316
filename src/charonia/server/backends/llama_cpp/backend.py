"""The `llama_cpp` backend: serves GGUF files with llama.cpp.

Names of parameters are those of xllamacpp's `CommonParams`, which are llama.cpp's. Sources of the header of a GGUF
file: the GGUF specification, versions 2 and 3.
"""

import asyncio
import json
import logging
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.parameters import ALIASES, MAX_MODEL_LEN, REQUESTS_MAX
from charonia.config.problems import Problem, check_problems
from charonia.core.errors import ServingError, invalid
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles
from charonia.server.backends.array_backend import broken_file_hint, model_file
from charonia.server.backends.language.backend import LanguageBackend, complete_language
from charonia.server.backends.parameters import Kind, Param, Params
from charonia.server.backends.python.environment import ENVIRONMENT
from charonia.server.backends.workers.model import START_SECONDS

FILE = "model.json"
"""File in a version's folder with parameters as JSON; those of the configuration take precedence."""

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def _each(names: str, kind: Kind, ge: float | None = None) -> Iterator[Param]:
    return (Param(name, kind=kind, ge=ge) for name in names.split())


def _one_of(*names: str) -> Kind:
    return {name: name for name in names}


PARAMETERS = Params(
    "llama_cpp",
    *_each("n_parallel n_threads n_threads_batch n_batch n_ubatch", int, 1),
    *_each("n_ctx main_gpu n_cache_reuse verbosity", int, 0),
    *_each("n_gpu_layers n_predict cache_ram_mib embd_normalize", int, -1),
    *_each("rope_freq_base rope_freq_scale", float, 0),
    *_each("embedding kv_unified cache_prompt ctx_shift swa_full warmup use_jinja", bool),
    *_each("no_kv_offload check_tensors fit_params", bool),
    *_each("chat_template mmproj", str),
    *_each("cache_type_k cache_type_v", _one_of(*CACHE_TYPES)),
    *_each("flash_attn_type", _one_of("auto", "enabled", "disabled")),
    *_each("load_mode", _one_of("auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io")),
    *_each("pooling_type", _one_of("none", "mean", "cls", "last")),
    *_each("reasoning_format", _one_of("none", "auto", "deepseek", "deepseek_legacy")),
    *_each("rope_scaling_type", _one_of("none", "linear", "yarn", "longrope")),
    *_each("split_mode", _one_of("none", "layer", "row")),
    others=(MAX_MODEL_LEN, REQUESTS_MAX, ALIASES, START_SECONDS, ENVIRONMENT),
)


def read_parameters(config: ModelConfig, file: bytes | None) -> tuple[dict[str, Any], list[Problem]]:
    """Return the parameters of a model, and all problems.

    Args:
        file: Content of `model.json`, None where there is none.
    """
    parameters: dict[str, tuple[str, str]] = {}
    problems: list[Problem] = []
    if file is not None:
        try:
            document = json.loads(file)
        except ValueError as error:
            return {}, [Problem(FILE, f"expected a JSON object: {error}")]
        if not isinstance(document, dict):
            return {}, [Problem(FILE, f"expected a JSON object, got {type(document).__name__}")]
        known = {each.name for each in PARAMETERS.declared}
        for name, value in document.items():
            if name not in known:
                near = PARAMETERS.closest(name)
                hint = f"; did you mean '{near}'?" if near else ""
                problems.append(Problem(f"{FILE}: {name}", f"llama.cpp has no such parameter here{hint}"))
            elif name not in config.parameters:
                parameters[name] = (f"{FILE}: {name}", value if isinstance(value, str) else json.dumps(value))
    values = PARAMETERS.values(config, overriding=parameters)
    return {name: values[name] for name in values.entries}, [*problems, *values.problems]


MAGIC = b"GGUF"

_CONTEXT_LENGTH = b".context_length" + struct.pack("<I", 4)
"""The end of the key `<architecture>.context_length`, and the type of its value: 32 bits without sign."""

_SEARCHED = 64 * 2**20
"""Bytes of a file in which the key is looked for: more than a header has before it."""


def context_length(path: Path) -> int:
    """Return the tokens of context that a model was trained for, 0 where its header says none. Blocks on disk I/O."""
    with (
        suppress(OSError, ValueError, struct.error),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        at = data.find(_CONTEXT_LENGTH, 0, _SEARCHED)
        return struct.unpack_from("<I", data, at + len(_CONTEXT_LENGTH))[0] if at >= 0 else 0
    return 0


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
    check_problems(config.name, problems)
    return parameters


def _described(files: ModelFiles, config: ModelConfig) -> tuple[dict[str, Any], int]:
    """Return the parameters of a model, and the tokens of context that a request can have, 0 if the file is broken."""
    parameters = _parameters(files, config)
    length: int = parameters.get("n_ctx") or 0
    if not length:
        with suppress(ServingError):
            length = context_length(model_file(files, config, DEFAULT_FILE))
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
    return {"path": str(path), "parameters": parameters}
