"""The compared models, as model repositories of one model each."""

import math
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODEL = "model"

_IDENTITY_TENSORS = """\
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
"""

_IMAGE_TENSORS = """\
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]
"""

_IN_ENGINE = 'parameters { key: "front_end" value { string_value: "no" } }\n'

_STRING_TENSORS = _IDENTITY_TENSORS.replace("FP32", "STRING").replace("16", "-1")

_MLP_TENSORS = """\
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 128 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 10 ] } ]
"""

_TUNED = """\
platform: "onnxruntime_onnx"
max_batch_size: 64
dynamic_batching { }
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""

_PYTHON_IDENTITY = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
"""

_PYTHON_MLP = """\
import os

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = os.path.join(os.path.dirname(__file__), "model.onnx")
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy() for r in requests]
        (scores,) = self.session.run(None, {"INPUT0": np.concatenate(arrays)})
        parts = np.split(scores, np.cumsum([len(a) for a in arrays])[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", part)]) for part in parts]
"""


def identity(folder: Path) -> None:
    """Write the identity backend's model: FP32 [16] in and out, no batching."""
    _write(folder, 'backend: "identity"\n' + _IDENTITY_TENSORS)


def python_identity(folder: Path) -> None:
    """Write the same as a Python model."""
    _write(folder, 'backend: "python"\n' + _IDENTITY_TENSORS)
    (folder / MODEL / "1" / "model.py").write_text(_PYTHON_IDENTITY)


def python_slow(folder: Path) -> None:
    """Write the same as a Python model that takes 5 ms: slower than any client."""
    _sleeping(folder, 0.005)


def python_busy(folder: Path) -> None:
    """Write the same as a Python model that takes 2.5 ms: easily overloaded."""
    _sleeping(folder, 0.0025)


def _sleeping(folder: Path, seconds: float) -> None:
    _write(folder, 'backend: "python"\n' + _IDENTITY_TENSORS)
    slow = _PYTHON_IDENTITY.replace("        arrays", f"        time.sleep({seconds} * len(requests))\n        arrays")
    (folder / MODEL / "1" / "model.py").write_text("import time\n\n" + slow)


def python_batched(folder: Path) -> None:
    """Write the same Python model with dynamic batching: requests that come together run together."""
    batching = 'backend: "python"\nmax_batch_size: 64\ndynamic_batching { }\n'
    _write(folder, batching + _IDENTITY_TENSORS)
    (folder / MODEL / "1" / "model.py").write_text(_PYTHON_IDENTITY)


def python_strings(folder: Path) -> None:
    """Write the same Python model for strings."""
    _write(folder, 'backend: "python"\n' + _STRING_TENSORS)
    (folder / MODEL / "1" / "model.py").write_text(_PYTHON_IDENTITY)


def image(folder: Path) -> None:
    """Write the identity backend's model for an image: FP32 [3, 224, 224], 602,112 bytes in and out."""
    _write(folder, 'backend: "identity"\n' + _IMAGE_TENSORS)


def engine_identity(folder: Path) -> None:
    """Write `identity` as a model that runs in the engine, never in front ends."""
    _write(folder, 'backend: "identity"\n' + _IDENTITY_TENSORS + _IN_ENGINE)


def engine_image(folder: Path) -> None:
    """Write `image` as a model that runs in the engine, never in front ends."""
    _write(folder, 'backend: "identity"\n' + _IMAGE_TENSORS + _IN_ENGINE)


def python_image(folder: Path) -> None:
    """Write the same as a Python model."""
    _write(folder, 'backend: "python"\n' + _IMAGE_TENSORS)
    (folder / MODEL / "1" / "model.py").write_text(_PYTHON_IDENTITY)


def mlp(folder: Path) -> None:
    """Write an ONNX perceptron 128-256-256-10, no configuration: everything as it comes."""
    _write(folder, None)
    onnx.save(_mlp_graph(), folder / MODEL / "1" / "model.onnx")


def mlp_tuned(folder: Path) -> None:
    """Write the same perceptron as one tunes it by hand: one instance, one thread, dynamic batching."""
    _write(folder, _TUNED + _MLP_TENSORS)
    onnx.save(_mlp_graph(), folder / MODEL / "1" / "model.onnx")


def python_mlp(folder: Path) -> None:
    """Write the same perceptron called from a Python model, for servers without an ONNX backend."""
    _write(folder, 'backend: "python"\nmax_batch_size: 16\ndynamic_batching { }\n' + _MLP_TENSORS)
    (folder / MODEL / "1" / "model.py").write_text(_PYTHON_MLP)
    onnx.save(_mlp_graph(), folder / MODEL / "1" / "model.onnx")


MODELS: dict[str, Callable[[Path], None]] = {
    "identity": identity,
    "python_identity": python_identity,
    "python_batched": python_batched,
    "python_slow": python_slow,
    "python_busy": python_busy,
    "python_string": python_strings,
    "python_strings": python_strings,
    "image": image,
    "engine_identity": engine_identity,
    "engine_image": engine_image,
    "python_image": python_image,
    "mlp": mlp,
    "mlp_tuned": mlp_tuned,
    "python_mlp": python_mlp,
}

INPUT_SHAPES = {
    "identity": [16],
    "python_identity": [16],
    "python_batched": [16],
    "python_slow": [16],
    "python_busy": [16],
    "python_string": [1],
    "python_strings": [1000],
    "image": [3, 224, 224],
    "engine_identity": [16],
    "engine_image": [3, 224, 224],
    "python_image": [3, 224, 224],
    "mlp": [128],
    "mlp_tuned": [128],
    "python_mlp": [128],
}

STRING = b"a text of 24 characters!"
"""Each element of a string tensor."""

OUTPUT_SHAPES = {"identity": [16], "mlp": [10]}
"""Of the models that there are fixed answers for."""


BATCHED = {"mlp", "mlp_tuned", "python_batched", "python_mlp"}
"""The models whose requests have a batch dimension in front."""


def input_tensor(model: str) -> tuple[str, list[int], bytes]:
    """Return the datatype, shape and content of a request's only input."""
    shape = [1, *INPUT_SHAPES[model]] if is_batched(model) else [*INPUT_SHAPES[model]]
    if MODELS[model] is python_strings:
        return "BYTES", shape, (struct.pack("<I", len(STRING)) + STRING) * math.prod(shape)
    return "FP32", shape, bytes(4 * math.prod(shape))


def is_batched(model: str) -> bool:
    """Whether requests to the model have a batch dimension in front."""
    return model in BATCHED


def _write(folder: Path, config: str | None) -> None:
    (folder / MODEL / "1").mkdir(parents=True)
    if config is not None:
        (folder / MODEL / "config.pbtxt").write_text(config)


def _mlp_graph() -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    sizes = [128, 256, 256, 10]
    nodes, weights, name = [], [], "INPUT0"
    for layer, (rows, columns) in enumerate(pairwise(sizes)):
        last = layer == len(sizes) - 2
        matrix = generator.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)
        weights += [
            numpy_helper.from_array(matrix, f"w{layer}"),
            numpy_helper.from_array(np.zeros(columns, np.float32), f"b{layer}"),
        ]
        product = "OUTPUT0" if last else f"h{layer}"
        nodes.append(helper.make_node("Gemm", [name, f"w{layer}", f"b{layer}"], [product]))
        name = product
        if not last:
            nodes.append(helper.make_node("Relu", [product], [f"r{layer}"]))
            name = f"r{layer}"
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("INPUT0", TensorProto.FLOAT, ["batch", 128])],
        [helper.make_tensor_value_info("OUTPUT0", TensorProto.FLOAT, ["batch", 10])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
