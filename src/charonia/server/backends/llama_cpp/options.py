"""Params of llama.cpp: those that a model may set, how they are read, and what is wrong with them. Pure.

Their names are those of xllamacpp's `CommonParams`, which are llama.cpp's.
"""

import json
from collections.abc import Iterator
from typing import Any

from charonia.config.model import ModelConfig
from charonia.config.parameters import MAX_MODEL_LEN
from charonia.config.problems import Problem
from charonia.server.backends.parameters import Kind, Param, Params
from charonia.server.backends.python.backend import START_SECONDS
from charonia.server.backends.python.environment import ENVIRONMENT

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
    others=(MAX_MODEL_LEN, START_SECONDS, ENVIRONMENT),
)


def read_parameters(config: ModelConfig, file: bytes | None) -> tuple[dict[str, Any], list[Problem]]:
    """Return the parameters of a model, and all problems.

    Args:
        config: Its configuration.
        file: Content of `model.json`, None where there is none.
    """
    given: dict[str, tuple[str, str]] = {}
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
                near = PARAMETERS.near(name)
                hint = f"; did you mean '{near}'?" if near else ""
                problems.append(Problem(f"{FILE}: {name}", f"llama.cpp has no such parameter here{hint}"))
            elif name not in config.parameters:
                given[name] = (f"{FILE}: {name}", value if isinstance(value, str) else json.dumps(value))
    values = PARAMETERS.values(config, overriding=given)
    return {name: values[name] for name in values.given}, [*problems, *values.problems]
