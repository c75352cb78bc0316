"""What a model's configuration and the backend's settings say about its sessions, as one record. Pure."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from charonia.config.model import ModelConfig
from charonia.config.parameters import SERVER_PARAMETERS
from charonia.config.problems import Problem

GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED"}
"""Names of ONNX Runtime's optimisation levels by `optimization.graph.level`."""

GPU_PARAMETERS = {
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "do_copy_in_default_stream": {"0": "0", "1": "1", "false": "0", "true": "1"},
    "gpu_mem_limit": {},
}
"""Parameters of GPU instances and what ONNX Runtime calls their values; empty for whole numbers."""

_T = TypeVar("_T")

_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_ENTRY_PREFIXES = ("session.", "optimization.", "mlas.", "ep.")
_SETTINGS = ("enable-global-threadpool", "intra_op_thread_count", "inter_op_thread_count")
_PARAMETERS = (
    "intra_op_thread_count",
    "inter_op_thread_count",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
    _SHRINKAGE,
    *GPU_PARAMETERS,
)
_FLAGS = {"0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """How the sessions of a model are made.

    Attributes:
        intra_op_threads: Threads of one operator; 0 for the share of the thread budget.
        inter_op_threads: Threads over operators, where `is_parallel`.
        is_parallel: Whether independent operators may run at the same time.
        graph_level: Name of the optimisation level.
        has_arena: Whether memory is kept between runs.
        has_pattern: Whether memory is planned for each shape; None for what suits the model.
        entries: Session configuration entries that the model asks for.
        run_entries: Run configuration entries.
        op_libraries: Files of custom operators.
        gpu_options: Options of the CUDA provider.
        uses_global_pool: Whether the sessions use the process's thread pool.
    """

    intra_op_threads: int = 0
    inter_op_threads: int = 1
    is_parallel: bool = False
    graph_level: str = GRAPH_LEVELS[0]
    has_arena: bool = True
    has_pattern: bool | None = None
    entries: tuple[tuple[str, str], ...] = ()
    run_entries: tuple[tuple[str, str], ...] = ()
    op_libraries: tuple[str, ...] = ()
    gpu_options: tuple[tuple[str, str], ...] = ()
    uses_global_pool: bool = False


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[SessionPlan, list[Problem]]:
    """Return the plan and everything that is wrong in what it was made from.

    Args:
        config: The model's configuration; its parameters win over the settings.
        settings: Settings of the backend (`--backend-config`); those that are not its own are left alone.
    """
    problems: list[Problem] = []
    values = {key: (f"--backend-config {key}", settings[key]) for key in _SETTINGS if key in settings}
    values |= {key: (f"parameters['{key}']", text) for key, text in config.parameters.items()}

    def number(key: str, default: int) -> int:
        path, text = values.get(key, ("", str(default)))
        if text.isascii() and text.isdigit():
            return int(text)
        problems.append(Problem(path, f"expected a whole number of at least 0, got '{text}'"))
        return default

    def choice(key: str, choices: Mapping[str, _T], default: _T) -> _T:
        if key not in values:
            return default
        path, text = values[key]
        if text.lower() not in choices:
            problems.append(Problem(path, f"expected one of {', '.join(choices)}, got '{text}'"))
        return choices.get(text.lower(), default)

    level = config.optimization.graph.level if config.optimization and config.optimization.graph else 0
    if level not in GRAPH_LEVELS:
        problems.append(
            Problem("optimization.graph.level", f"expected -1 (basic), 0 (all) or 1 (extended), got {level}")
        )
    gpu_options = []
    for key, choices in GPU_PARAMETERS.items():
        if key in values:
            gpu_options.append((key, choice(key, choices, "") if choices else str(number(key, 0))))
    operations = config.model_operations
    plan = SessionPlan(
        intra_op_threads=number("intra_op_thread_count", 0),
        inter_op_threads=number("inter_op_thread_count", 1) or 1,
        is_parallel=choice("execution_mode", {"0": False, "1": True}, False),
        graph_level=GRAPH_LEVELS.get(level, GRAPH_LEVELS[0]),
        has_arena=choice("enable_mem_arena", _FLAGS, True),
        has_pattern=choice("enable_mem_pattern", _FLAGS, None),
        entries=tuple((k, v) for k, v in sorted(config.parameters.items()) if k.startswith(_ENTRY_PREFIXES)),
        run_entries=tuple((k, v) for k, v in config.parameters.items() if k == _SHRINKAGE),
        op_libraries=operations.op_library_filename if operations is not None else (),
        gpu_options=tuple(gpu_options),
        uses_global_pool=choice("enable-global-threadpool", _FLAGS, False),
    )
    return plan, problems


def unknown_parameters(config: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each parameter that has no meaning here."""
    for key in sorted(config.parameters.keys() - SERVER_PARAMETERS):
        if key not in _PARAMETERS and not key.startswith(_ENTRY_PREFIXES):
            near = difflib.get_close_matches(key, _PARAMETERS, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            yield f"model '{config.name}': ONNX Runtime has no parameter '{key}', it has no effect{hint}"
