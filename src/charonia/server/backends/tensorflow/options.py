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
from charonia.server.backends.parameters import Param, Params
from charonia.server.backends.python.backend import EXECUTE_SECONDS, START_SECONDS

GRAPH_TAG = "TF_GRAPH_TAG"
SIGNATURE = "TF_SIGNATURE_DEF"
INTRA = "TF_NUM_INTRA_THREADS"
INTER = "TF_NUM_INTER_THREADS"
INIT_OPS = "TF_INIT_OPS_FILE"
SESSION_THREADS = "TF_USE_PER_SESSION_THREADS"
SESSION_SHARE = "MAX_SESSION_SHARE_COUNT"

SOFT_PLACEMENT = "allow-soft-placement"
VERSION = "version"

# fmt: off
PARAMETERS = Params(
    "tensorflow",
    Param(SIGNATURE, "name of the signature", str, "", "`serving_default`, or the only one"),
    Param(GRAPH_TAG, "tag of the graph; of several graphs that have it, the one with the fewest other tags counts", str,
          "", "`serve`"),
    Param(INTRA, "threads within an operator, for each instance", int, 0, "the thread budget", ge=0),
    Param(INTER, "threads across operators, for each instance; 0: none, they run one after the other", int, 0, "0",
          ge=0),
    Param(INIT_OPS, 'file in the folder of the version or the model: `{"init_ops": ["name of an operation"]}`, run '
          "after the model is loaded", str, ""),
    Param(SESSION_THREADS, "accepted: each session has its own threads in any case", bool),
    Param(SESSION_SHARE, "no effect, with a line in the log: instances are processes, and share no session", int, ge=1),
    Param(SOFT_PLACEMENT, kind=bool, default=True, is_setting_only=True),
    Param(VERSION, kind={"2": 2}, default=2, is_setting_only=True),
    others=(START_SECONDS, EXECUTE_SECONDS),
)
# fmt: on
GPU_MEMORY = ("gpu-memory-fraction", "allow-gpu-memory-growth")
"""Settings that have no effect: models run on the CPU."""

GRAPH = "model.graphdef"
"""Default name of a frozen graph."""

CALLER = -1
"""Number of threads across operators for which a session runs them one after the other, in the thread that calls."""


@dataclass(frozen=True, slots=True)
class TensorFlowPlan:
    """The values of `PARAMETERS`.

    Attributes:
        inter_threads: Threads across operators, or `CALLER`.
        soft_placement: Whether an operator runs on another device where its own is not there.
    """

    tag: str = ""
    signature: str = ""
    intra_threads: int = 0
    inter_threads: int = CALLER
    init_ops_file: str = ""
    soft_placement: bool = True


def read_plan(config: ModelConfig, settings: Mapping[str, str]) -> tuple[TensorFlowPlan, list[Problem]]:
    """Return the plan, and all problems in the configuration and settings."""
    values = PARAMETERS.values(config, settings)
    plan = TensorFlowPlan(
        tag=values[GRAPH_TAG],
        signature=values[SIGNATURE],
        intra_threads=values[INTRA],
        inter_threads=values[INTER] or CALLER,
        init_ops_file=values[INIT_OPS],
        soft_placement=values[SOFT_PLACEMENT],
    )
    return plan, [*values.problems, *_unsupported(config)]


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
    yield from PARAMETERS.remarks(config)
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
