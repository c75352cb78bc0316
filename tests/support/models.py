"""Small real models and model folders, for tests and benchmarks.

Every function that returns `bytes` returns the content of a `model.onnx`; weights are random and always the same.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.support.onnx_writer import GraphWriter

from charonia.core.dtypes import DataType

PYTHON_IDENTITY = '''\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers each request with its own input."""

    def execute(self, requests):
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
        return responses
'''
"""`model.py` of a Python model with input INPUT0 and output OUTPUT0."""


def answering(answer: str, output: str = "OUTPUT0", *, imports: str = "") -> str:
    """Return `model.py` of a model that gives each request one answer.

    Args:
        answer: What it is, as an expression of the `request` and its first input, `array`.
        output: Name of the output.
        imports: Further imports.
    """
    return f'''\
{imports}
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request, request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, request, array):
        return pb_utils.InferenceResponse([pb_utils.Tensor("{output}", {answer})])
'''


def streaming(responses: str, output: str = "OUTPUT0", *, pause_s: float = 0.0) -> str:
    """Return `model.py` of a model that sends any number of responses.

    Args:
        responses: What they are, as an expression of the input `array`.
        output: Name of the output.
        pause_s: Time after each of them.
    """
    return f'''\
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            array = request.inputs()[0].as_numpy()
            for response in {responses}:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("{output}", response)]))
                time.sleep({pause_s})
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''


NUMBERS_BELOW = "(np.array([number], np.int32) for number in range(int(array[0])))"
COUNT = streaming(NUMBERS_BELOW, "NUMBER")
"""`model.py` that sends the numbers below UPTO one by one."""

COUNT_PBTXT = """\
backend: "python"
input { name: "UPTO" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""

_BATCH = "batch"


def write_model(
    repository: Path, name: str, content: bytes | str, *, config: str = "", file_name: str = "", version: int = 1
) -> Path:
    """Write a model folder and return it.

    Args:
        repository: Model repository; made where it does not exist.
        content: The model file: bytes of an ONNX model or text of a Python model. Empty for none.
        config: Text of config.pbtxt; empty for no such file.
        file_name: Name of the model file; empty for model.onnx or model.py.
    """
    folder = repository / name
    version_dir = folder / str(version)
    version_dir.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes) and content:
        (version_dir / (file_name or "model.onnx")).write_bytes(content)
    elif isinstance(content, str) and content:
        (version_dir / (file_name or "model.py")).write_text(content, encoding="utf-8")
    if config:
        (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    return folder


def identity_pbtxt(
    backend: str = "identity",
    datatype: DataType = DataType.FP32,
    dims: Sequence[int] = (16,),
    *,
    max_batch_size: int = 64,
    more: str = "",
) -> str:
    """Return config.pbtxt of a model with input INPUT0 and output OUTPUT0 of the same type; `more` is appended."""
    tensor = f"data_type: {datatype.config} dims: {list(dims)}"
    return (
        f'backend: "{backend}"\nmax_batch_size: {max_batch_size}\n'
        f'input {{ name: "INPUT0" {tensor} }}\noutput {{ name: "OUTPUT0" {tensor} }}\n{more}'
    )


def chain_pbtxt(
    *models: str,
    given: str = "INPUT0",
    wanted: str = "OUTPUT0",
    datatype: DataType = DataType.FP32,
    dims: Sequence[int] = (16,),
    max_batch_size: int = 64,
    more: str = "",
) -> str:
    """Return config.pbtxt of an ensemble of models after one another, which all have an input and output of its names.

    Args:
        given: Name of the inputs.
        wanted: Name of the outputs.
        more: It is appended.
    """
    tensors = [given, *(f"between{number}" for number in range(1, len(models))), wanted]
    steps = "\n".join(
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "{given}" value: "{before}" }} '
        f'output_map {{ key: "{wanted}" value: "{after}" }} }}'
        for model, (before, after) in zip(models, pairwise(tensors), strict=True)
    )
    text = identity_pbtxt("", datatype, dims, max_batch_size=max_batch_size)
    text = text.replace('backend: ""', 'platform: "ensemble"').replace("INPUT0", given).replace("OUTPUT0", wanted)
    return f"{text}ensemble_scheduling {{ {steps} }}\n{more}"


def identity(datatype: DataType = DataType.FP32, dims: Sequence[int | str] = (16,), *, batches: bool = True) -> bytes:
    """INPUT0 -> OUTPUT0, of any datatype; names stand for variable dimensions, no `dims` for scalars."""
    shape = [_BATCH, *dims] if batches else list(dims)
    graph = GraphWriter()
    graph.input("INPUT0", datatype, shape)
    graph.node("Identity", ["INPUT0"], "OUTPUT0")
    graph.output("OUTPUT0", datatype, shape)
    return graph.model()


def add_sub(datatype: DataType = DataType.FP32, dims: Sequence[int | str] = (16,), *, batches: bool = True) -> bytes:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1."""
    shape = [_BATCH, *dims] if batches else list(dims)
    graph = GraphWriter()
    inputs = [graph.input(name, datatype, shape) for name in ("INPUT0", "INPUT1")]
    for operator, output in (("Add", "OUTPUT0"), ("Sub", "OUTPUT1")):
        graph.node(operator, inputs, output)
        graph.output(output, datatype, shape)
    return graph.model()


def mlp(sizes: Sequence[int] = (128, 256, 256, 10)) -> bytes:
    """A perceptron with ReLU between its layers: input [batch, 128] -> output [batch, 10]."""
    random = np.random.default_rng(1)
    graph = GraphWriter()
    value = graph.input("input", DataType.FP32, [_BATCH, sizes[0]])
    last = len(sizes) - 2
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        weight = graph.weight(f"w{layer}", DataType.FP32, _weights(random, (fan_in, fan_out), fan_in))
        bias = graph.weight(f"b{layer}", DataType.FP32, _weights(random, (fan_out,), fan_in))
        value = graph.node("Gemm", [value, weight, bias], "output" if layer == last else f"sum{layer}")
        if layer != last:
            value = graph.node("Relu", [value], f"hidden{layer}")
    graph.output("output", DataType.FP32, [_BATCH, sizes[-1]])
    return graph.model()


def resnet18(size: int = 224, classes: int = 1000) -> bytes:
    """A network of ResNet-18's shape and cost (11.7 million weights): input [batch, 3, size, size] -> [batch, classes].

    Source: He et al. (2016), table 1; batch normalisation is taken as folded into the convolutions.
    """
    random = np.random.default_rng(2)
    graph = GraphWriter()

    def convolution(source: str, name: str, shape: tuple[int, int], kernel: int, stride: int) -> str:
        fan_in = shape[1] * kernel * kernel
        weight = graph.weight(f"{name}.w", DataType.FP32, _weights(random, (*shape, kernel, kernel), fan_in))
        bias = graph.weight(f"{name}.b", DataType.FP32, _weights(random, (shape[0],), fan_in))
        pads = [kernel // 2] * 4
        return graph.node(
            "Conv", [source, weight, bias], name, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads
        )

    value = graph.input("input", DataType.FP32, [_BATCH, 3, size, size])
    value = graph.node("Relu", [convolution(value, "stem", (64, 3), 7, 2)], "stem.relu")
    value = graph.node("MaxPool", [value], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name = f"stage{stage}.{block}"
            stride = 2 if block == 0 and stage > 0 else 1
            hidden = graph.node(
                "Relu", [convolution(value, f"{name}.a", (width, channels), 3, stride)], f"{name}.a.relu"
            )
            hidden = convolution(hidden, f"{name}.b", (width, width), 3, 1)
            if stride != 1:
                value = convolution(value, f"{name}.skip", (width, channels), 1, stride)
            value = graph.node("Relu", [graph.node("Add", [hidden, value], f"{name}.sum")], f"{name}.out")
            channels = width
    value = graph.node("Flatten", [graph.node("GlobalAveragePool", [value], "mean")], "flat")
    weight = graph.weight("head.w", DataType.FP32, _weights(random, (channels, classes), channels))
    graph.node("MatMul", [value, weight], "output")
    graph.output("output", DataType.FP32, [_BATCH, classes])
    return graph.model()


def token_means(classes: int = 8) -> bytes:
    """Ids of any length -> a vector: `ids` INT64 [batch, length] -> `mean` FP32 [batch, 8]. Ids lie in [0, 100)."""
    random = np.random.default_rng(3)
    graph = GraphWriter()
    graph.input("ids", DataType.INT64, [_BATCH, "length"])
    table = graph.weight("table", DataType.FP32, _weights(random, (100, classes), 1))
    rows = graph.node("Gather", [table, "ids"], "rows")
    graph.node("ReduceMean", [rows], "mean", axes=[1], keepdims=0)
    graph.output("mean", DataType.FP32, [_BATCH, classes])
    return graph.model()


def scaled(default: float = 2.0) -> bytes:
    """`y` = `x` [4] * `scale` [1]; `scale` may be left out and is then `default`. Without batching."""
    graph = GraphWriter()
    graph.input("x", DataType.FP32, [4])
    graph.input("scale", DataType.FP32, [1])
    graph.weight("scale", DataType.FP32, np.array([default], np.float32))
    graph.node("Mul", ["x", "scale"], "y")
    graph.output("y", DataType.FP32, [4])
    return graph.model()


def _weights(random: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> NDArray[np.float32]:
    weights: NDArray[np.float64] = random.standard_normal(shape) * np.sqrt(2 / fan_in)
    return weights.astype(np.float32)


def save_skops(estimator: object, path: Path | str) -> None:
    """Save an estimator; to import skops takes seconds, since it looks for all types of SciPy and scikit-learn."""
    import skops.io

    skops.io.dump(estimator, path)
