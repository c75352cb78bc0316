"""Parameters of llama.cpp: those that a model may set, how they are read, and what is wrong with them. Pure.

Their names are those of xllamacpp's `CommonParams`, which are llama.cpp's.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from charonia.config.model import ModelConfig
from charonia.config.parameters import OPENAI_ROUTES, SERVER_PARAMETERS
from charonia.config.problems import Problem
from charonia.server.backends.python.backend import START_SECONDS
from charonia.server.backends.python.environment import ENVIRONMENT

FILE = "model.json"
"""File in a version's folder with parameters as JSON; those of the configuration take precedence."""

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


class LlamaParameter(NamedTuple):
    """One parameter.

    Attributes:
        words: What it expects.
        read: Returns its value, of JSON or text; raises ValueError or TypeError for one that it does not expect.
    """

    words: str
    read: Callable[[Any], Any]


def _integer(least: int) -> LlamaParameter:
    def read(value: Any) -> int:
        number = int(value) if isinstance(value, str) else value
        if type(number) is not int or number < least:
            raise ValueError
        return number

    return LlamaParameter(f"a whole number of at least {least}", read)


def _choice(*names: str) -> LlamaParameter:
    return LlamaParameter(f"one of {', '.join(names)}", lambda value: names[names.index(value.lower())])


def _read_number(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not 0 <= number < float("inf"):
        raise ValueError
    return number


def _read_flag(value: Any) -> bool:
    flags = {"true": True, "false": False, "1": True, "0": False}
    return value if isinstance(value, bool) else flags[value.lower()]


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


_NUMBER = LlamaParameter("a number of at least 0", _read_number)
_FLAG = LlamaParameter("true or false", _read_flag)
_TEXT = LlamaParameter("a text", _read_text)

_READ: Mapping[str, LlamaParameter] = {
    **dict.fromkeys(("n_parallel", "n_threads", "n_threads_batch", "n_batch", "n_ubatch"), _integer(1)),
    **dict.fromkeys(("n_ctx", "main_gpu", "n_cache_reuse", "verbosity"), _integer(0)),
    **dict.fromkeys(("n_gpu_layers", "n_predict", "cache_ram_mib", "embd_normalize"), _integer(-1)),
    **dict.fromkeys(("rope_freq_base", "rope_freq_scale"), _NUMBER),
    **dict.fromkeys(("embedding", "kv_unified", "cache_prompt", "ctx_shift", "swa_full", "warmup", "use_jinja"), _FLAG),
    **dict.fromkeys(("no_kv_offload", "check_tensors", "fit_params"), _FLAG),
    **dict.fromkeys(("chat_template", "mmproj"), _TEXT),
    **dict.fromkeys(("cache_type_k", "cache_type_v"), _choice(*CACHE_TYPES)),
    "flash_attn_type": _choice("auto", "enabled", "disabled"),
    "load_mode": _choice("auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io"),
    "pooling_type": _choice("none", "mean", "cls", "last"),
    "reasoning_format": _choice("none", "auto", "deepseek", "deepseek_legacy"),
    "rope_scaling_type": _choice("none", "linear", "yarn", "longrope"),
    "split_mode": _choice("none", "layer", "row"),
}

PARAMETERS = tuple(sorted(_READ))
"""Every parameter."""

_OTHERS = (OPENAI_ROUTES, START_SECONDS, ENVIRONMENT)


def read_parameters(config: ModelConfig, file: bytes | None) -> tuple[dict[str, Any], list[Problem]]:
    """Return the parameters of a model, and all problems.

    Args:
        config: Its configuration.
        file: Content of `model.json`, None where there is none.
    """
    given: dict[str, tuple[str, object]] = {}
    problems: list[Problem] = []
    if file is not None:
        try:
            document = json.loads(file)
        except ValueError as error:
            document, problem = {}, f"expected a JSON object: {error}"
        else:
            problem = "" if isinstance(document, dict) else f"expected a JSON object, got {type(document).__name__}"
        if problem:
            return {}, [Problem(FILE, problem)]
        for name, value in document.items():
            if name in _READ:
                given[name] = (f"{FILE}: {name}", value)
            else:
                problems.append(Problem(f"{FILE}: {name}", f"llama.cpp has no such parameter here{_near(name)}"))
    given |= {name: (f"parameters['{name}']", text) for name, text in config.parameters.items() if name in _READ}
    parameters = {}
    for name, (path, value) in given.items():
        try:
            parameters[name] = _READ[name].read(value)
        except (AttributeError, LookupError, TypeError, ValueError):
            problems.append(Problem(path, f"expected {_READ[name].words}, got {json.dumps(value)}"))
    return parameters, problems


def remarks(config: ModelConfig) -> Iterator[str]:
    for name in sorted(config.parameters.keys() - SERVER_PARAMETERS - _READ.keys() - set(_OTHERS)):
        yield f"model '{config.name}': the llama_cpp backend has no parameter '{name}', it has no effect{_near(name)}"


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, PARAMETERS, n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
