"""Writes TensorFlow Lite models without TensorFlow: a file is one flatbuffer, whose schema ai_edge_litert brings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

_TYPES = {
    "float32": schema.TensorType.FLOAT32,
    "int8": schema.TensorType.INT8,
    "int32": schema.TensorType.INT32,
    "int64": schema.TensorType.INT64,
    "bool": schema.TensorType.BOOL,
    "string": schema.TensorType.STRING,
    "complex64": schema.TensorType.COMPLEX64,
}
OPERATORS = schema.BuiltinOperator
"""Numbers of the operators, by name."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a subgraph: -1 stands for a variable dimension.

    Attributes:
        scale: Scale of a quantised tensor, 0 for none.
    """

    name: str
    shape: Sequence[int]
    dtype: str = "float32"
    value: NDArray[Any] | None = None
    scale: float = 0.0
    zero_point: int = 0


@dataclass(frozen=True, slots=True)
class Graph:
    """A subgraph: its operators are (operator, inputs, outputs), the tensors by name.

    Attributes:
        nodes: The operators, in order.
        signature: Name of its signature, "" for none.
        aliases: Names that the signature has for tensors, by the name of the tensor.
    """

    tensors: Sequence[Tensor]
    nodes: Sequence[tuple[int, Sequence[str], Sequence[str]]]
    inputs: Sequence[str]
    outputs: Sequence[str]
    signature: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)


def write(*graphs: Graph) -> bytes:
    model = schema.ModelT()
    model.version = 3
    model.buffers = [schema.BufferT()]
    model.operatorCodes = []
    model.subgraphs = []
    model.signatureDefs = []
    for number, graph in enumerate(graphs):
        index = {tensor.name: place for place, tensor in enumerate(graph.tensors)}
        subgraph = schema.SubGraphT()
        subgraph.name = graph.signature or "main"
        subgraph.tensors = [_tensor(tensor, model.buffers) for tensor in graph.tensors]
        subgraph.inputs = [index[name] for name in graph.inputs]
        subgraph.outputs = [index[name] for name in graph.outputs]
        subgraph.operators = [_operator(node, index, model.operatorCodes) for node in graph.nodes]
        model.subgraphs.append(subgraph)
        if graph.signature:
            signature = schema.SignatureDefT()
            signature.signatureKey = graph.signature
            signature.subgraphIndex = number
            signature.inputs = [_entry(name, index, graph.aliases) for name in graph.inputs]
            signature.outputs = [_entry(name, index, graph.aliases) for name in graph.outputs]
            model.signatureDefs.append(signature)
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def mlp(batch: int = -1, *, signature: str = "serving_default") -> bytes:
    """Return x: FP32 [batch, 16] -> scores: FP32 [batch, 4], one layer with a ReLU behind it."""
    weights = np.random.default_rng(0).normal(0, 0.25, (4, 16)).astype(np.float32)
    tensors = [
        Tensor("serving_default_x:0", (batch, 16)),
        Tensor("weights", (4, 16), value=weights),
        Tensor("bias", (4,), value=np.full(4, 0.1, np.float32)),
        Tensor("product", (batch, 4)),
        Tensor("PartitionedCall:0", (batch, 4)),
    ]
    nodes: list[tuple[int, Sequence[str], Sequence[str]]] = [
        (OPERATORS.FULLY_CONNECTED, ["serving_default_x:0", "weights", "bias"], ["product"]),
        (OPERATORS.RELU, ["product"], ["PartitionedCall:0"]),
    ]
    aliases = {"serving_default_x:0": "x", "PartitionedCall:0": "scores"}
    return write(Graph(tensors, nodes, ["serving_default_x:0"], ["PartitionedCall:0"], signature, aliases))


def mlp_expected(x: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = np.random.default_rng(0).normal(0, 0.25, (4, 16)).astype(np.float32)
    result: NDArray[np.float32] = np.maximum(x @ weights.T + np.float32(0.1), 0)
    return result


def convolutions(depth: int = 8, channels: int = 64) -> bytes:
    """Return x: FP32 [-1, 96, 96, 3] -> y: FP32 [-1, 96, 96, channels]: a large model, of 3 x 3 convolutions."""
    random = np.random.default_rng(0)
    tensors = [Tensor("x", (-1, 96, 96, 3)), Tensor("bias", (channels,), value=np.zeros(channels, np.float32))]
    nodes: list[tuple[int, Sequence[str], Sequence[str]]] = []
    name = "x"
    for layer in range(depth):
        kernel = random.normal(0, 0.05, (channels, 3, 3, 3 if layer == 0 else channels)).astype(np.float32)
        tensors.append(Tensor(f"kernel{layer}", kernel.shape, value=kernel))
        result = "y" if layer == depth - 1 else f"hidden{layer}"
        tensors.append(Tensor(result, (-1, 96, 96, channels)))
        nodes.append((OPERATORS.CONV_2D, [name, f"kernel{layer}", "bias"], [result]))
        name = result
    return write(Graph(tensors, nodes, ["x"], ["y"]))


def binary(
    operator: int = OPERATORS.ADD, shape: Sequence[int] = (-1, -1), *, signature: str = "", dtype: str = "float32"
) -> Graph:
    """Return a, b -> result of an operator with two inputs of one shape."""
    tensors = [Tensor(name, shape, dtype) for name in ("a", "b", "result")]
    return Graph(tensors, [(operator, ["a", "b"], ["result"])], ["a", "b"], ["result"], signature)


def unary(operator: int, given: Tensor, result: Tensor) -> bytes:
    return write(Graph([given, result], [(operator, [given.name], [result.name])], [given.name], [result.name]))


def _tensor(tensor: Tensor, buffers: list[Any]) -> Any:
    made = schema.TensorT()
    made.name = tensor.name
    made.shape = [max(1, size) for size in tensor.shape]
    made.shapeSignature = list(tensor.shape) if -1 in tensor.shape else None
    made.type = _TYPES[tensor.dtype]
    made.buffer = 0
    if tensor.value is not None:
        content = schema.BufferT()
        content.data = np.frombuffer(tensor.value.tobytes(), np.uint8)
        made.buffer = len(buffers)
        buffers.append(content)
    if tensor.scale:
        made.quantization = schema.QuantizationParametersT()
        made.quantization.scale = [tensor.scale]
        made.quantization.zeroPoint = [tensor.zero_point]
    return made


def _operator(node: tuple[int, Sequence[str], Sequence[str]], index: Mapping[str, int], codes: list[Any]) -> Any:
    operator, inputs, outputs = node
    code = schema.OperatorCodeT()
    code.builtinCode = operator
    code.deprecatedBuiltinCode = min(operator, 127)
    code.version = 1
    if operator == OPERATORS.CUSTOM:
        code.customCode = "Nope"
    made = schema.OperatorT()
    made.opcodeIndex = len(codes)
    codes.append(code)
    made.inputs = [index[name] for name in inputs]
    made.outputs = [index[name] for name in outputs]
    if operator == OPERATORS.FULLY_CONNECTED:
        made.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions
        made.builtinOptions = schema.FullyConnectedOptionsT()
    elif operator == OPERATORS.CONV_2D:
        made.builtinOptionsType = schema.BuiltinOptions.Conv2DOptions
        made.builtinOptions = schema.Conv2DOptionsT()
        made.builtinOptions.strideH = made.builtinOptions.strideW = 1
    elif operator == OPERATORS.ADD:
        made.builtinOptionsType = schema.BuiltinOptions.AddOptions
        made.builtinOptions = schema.AddOptionsT()
    elif operator == OPERATORS.MUL:
        made.builtinOptionsType = schema.BuiltinOptions.MulOptions
        made.builtinOptions = schema.MulOptionsT()
    return made


def _entry(name: str, index: Mapping[str, int], aliases: Mapping[str, str]) -> Any:
    made = schema.TensorMapT()
    made.name = aliases.get(name, name)
    made.tensorIndex = index[name]
    return made
