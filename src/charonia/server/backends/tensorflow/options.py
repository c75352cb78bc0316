"""Options of a TensorFlow model, from its parameters and the backend's settings. Pure.

Source of the parameters: the documentation of Triton's TensorFlow backend.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from charonia.config.forms import GRAPH_LINES
from charonia.config.model import ModelConfig
from charonia.config.problems import Problem
from charonia.server.backends.parameters import unknown_parameters
from charonia.server.backends.python.backend import EXECUTE_SECONDS, START_SECONDS

GRAPH_TAG = "TF_GRAPH_TAG"
SIGNATURE = "TF_SIGNATURE_DEF"
INTRA = "TF_NUM_INTRA_THREADS"
INTER = "TF_NUM_INTER_THREADS"
INIT_OPS = "TF_INIT_OPS_FILE"
SESSION_THREADS = "TF_USE_PER_SESSION_THREADS"
SESSION_SHARE = "MAX_SESSION_SHARE_COUNT"

PARAMETERS = (GRAPH_TAG, SIGNATURE, INTRA, INTER, INIT_OPS, SESSION_THREADS, SESSION_SHARE)
"""Every parameter of a model."""

SOFT_PLACEMENT = "allow-soft-placement"
VERSION = "version"
GPU_MEMORY = ("gpu-memory-fraction", "allow-gpu-memory-growth")
"""Settings that have no effect: models run on the CPU."""

_FLAGS = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}

GRAPH = "model.graphdef"
"""Default name of a frozen graph."""

CALLER = -1
"""Number of threads across operators for which a session runs them one after the other, in the thread that calls."""


@dataclass(frozen=True, slots=True)
class TensorFlowPlan:
    """Options of a model's session.

    Attributes:
        tag: Tag of the graph, "" for `serve`.
        signature: Name of the signature, "" for `serving_default`, or the only one.
        intra_threads: Threads within an operator, 0 for the instance's share of the thread budget.
        inter_threads: Threads across operators, or `CALLER`.
        init_ops_file: File with operations that initialise the session, "" for none.
        soft_placement: Whether an operator runs on another device where its own is not there.
    """

    tag: str = ""
    signature: str = ""
    intra_threads: int = 0
    inter_threads: int = CALLER
    init_ops_file: str = ""
    soft_placement: bool = True


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[TensorFlowPlan, list[Problem]]:
    """Return the plan, and all problems in the configuration and settings.

    Args:
        config: The model's configuration.
        settings: Settings of the backend (`--backend-config`).
    """
    problems: list[Problem] = []
    values = {key: (f"parameters['{key}']", text) for key, text in config.parameters.items()}
    values |= {
        key: (f"--backend-config tensorflow,{key}", settings[key])
        for key in (SOFT_PLACEMENT, VERSION)
        if key in settings
    }

    def number(key: str, least: int = 0) -> int:
        path, text = values.get(key, ("", str(least)))
        if text.isascii() and text.isdigit() and int(text) >= least:
            return int(text)
        problems.append(Problem(path, f"expected a whole number of at least {least}, got '{text}'"))
        return least

    def flag(key: str, default: bool) -> bool:
        path, text = values.get(key, ("", str(default)))
        if text.lower() not in _FLAGS:
            problems.append(Problem(path, f"expected true or false, got '{text}'"))
        return _FLAGS.get(text.lower(), default)

    flag(SESSION_THREADS, False)
    number(SESSION_SHARE, 1)
    if values.get(VERSION, ("", "2"))[1] != "2":
        problems.append(Problem(values[VERSION][0], f"expected 2, got '{values[VERSION][1]}'"))
    problems += _unsupported(config)
    plan = TensorFlowPlan(
        tag=config.parameters.get(GRAPH_TAG, ""),
        signature=config.parameters.get(SIGNATURE, ""),
        intra_threads=number(INTRA),
        inter_threads=number(INTER) or CALLER,
        init_ops_file=config.parameters.get(INIT_OPS, ""),
        soft_placement=flag(SOFT_PLACEMENT, True),
    )
    return plan, problems


def _unsupported(config: ModelConfig) -> Iterator[Problem]:
    optimization = config.optimization
    if optimization is not None and optimization.execution_accelerators is not None:
        yield Problem(
            "optimization.execution_accelerators",
            "TensorFlow models run on the CPU, without an accelerator: remove it, or serve the ONNX model that "
            "`charonia convert` makes",
        )
    if optimization is not None and optimization.graph is not None and optimization.graph.level > 0:
        yield Problem("optimization.graph.level", "expected 0: XLA is not available for TensorFlow models")
    if config.model_operations is not None and config.model_operations.op_library_filename:
        yield Problem(
            "model_operations.op_library_filename",
            "libraries of operators are not available for TensorFlow models: serve it as a Python model that calls "
            "tf.load_op_library",
        )


def remarks(config: ModelConfig, settings: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each parameter that is unknown, and for each that has no effect."""
    start = f"model '{config.name}'"
    yield from unknown_parameters(config, "tensorflow", (*PARAMETERS, START_SECONDS, EXECUTE_SECONDS))
    if config.parameters.get(SESSION_SHARE, "1") != "1":
        yield f"{start}: {SESSION_SHARE} has no effect: each instance has a process of its own"
    for key in GPU_MEMORY:
        if key in settings:
            yield f"{start}: --backend-config tensorflow,{key} has no effect: TensorFlow models run on the CPU"


def graph_problem(config: ModelConfig) -> tuple[str, str]:
    """Return why a frozen graph is not served, and how to make a SavedModel of it; empty for any other model."""
    name = config.default_model_filename
    if config.platform != "tensorflow_graphdef" and not name.endswith(".graphdef"):
        return "", ""
    path = PurePosixPath(name or GRAPH)
    lines = GRAPH_LINES.replace("{path_text}", json.dumps(path.name)).replace("{name}", path.stem)
    return (
        "a frozen graph (tensorflow_graphdef) is not served, a SavedModel is",
        f"convert it in the version's folder, and remove platform from config.pbtxt:\n{lines}",
    )
