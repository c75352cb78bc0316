"""ONNX models that take requests of different shapes as one batch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.backends import load, request_of, version_of
from tests.support.onnx_writer import GraphWriter

from charonia.config.kinds import BatchInputKind, InstanceKind
from charonia.config.model import BatchInput, BatchOutput, InstanceGroup, ModelConfig, ModelInput, ModelOutput, Reshape
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Array
from charonia.server.backends.onnxruntime.backend import OnnxRuntimeBackend, OnnxRuntimeInstance
from charonia.testing.backend_suite import arrays

FP32, INT32, INT64 = DataType.FP32, DataType.INT32, DataType.INT64
WITH_ZERO = BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO


def sums() -> bytes:
    """Return a model with the sum of each request and every element doubled."""
    graph = GraphWriter()
    graph.input("X", FP32, ("n",))
    graph.input("OFFSETS", INT32, ("m",))
    graph.weight("zero", FP32, np.zeros(1, "f4"))
    graph.weight("axis", INT64, np.array(0))
    graph.weight("one", INT64, np.array([1]))
    graph.weight("start", INT64, np.array([0]))
    graph.weight("last", INT64, np.array([-1]))
    graph.weight("far", INT64, np.array([1 << 40]))
    graph.node("CumSum", ["X", "axis"], "running")
    graph.node("Concat", ["zero", "running"], "upto", axis=0)
    graph.node("Slice", ["OFFSETS", "one", "far"], "ends")
    graph.node("Slice", ["OFFSETS", "start", "last"], "begins")
    graph.node("Gather", ["upto", "ends"], "high")
    graph.node("Gather", ["upto", "begins"], "low")
    graph.node("Sub", ["high", "low"], "sums")
    graph.node("Unsqueeze", ["sums", "one"], "SUM")
    graph.node("Add", ["X", "X"], "DOUBLE")
    graph.output("SUM", FP32, ("b", 1))
    graph.output("DOUBLE", FP32, ("n",))
    return graph.model()


SUMS = ModelConfig(
    name="m",
    backend="onnxruntime",
    max_batch_size=8,
    input=(ModelInput("X", FP32, dims=(-1,), allow_ragged_batch=True),),
    output=(ModelOutput("SUM", FP32, (1,)), ModelOutput("DOUBLE", FP32, (-1,))),
    batch_input=(BatchInput(WITH_ZERO, ("OFFSETS",), INT32, ("X",)),),
    batch_output=(BatchOutput(("DOUBLE",), source_input=("X",)),),
    instance_group=(InstanceGroup("m_0", InstanceKind.KIND_CPU, count=1),),
)


def make(folder: Path, content: bytes, config: ModelConfig) -> OnnxRuntimeInstance:
    instance: OnnxRuntimeInstance = load(OnnxRuntimeBackend, version_of(folder / "m", model_onnx=content), config)
    return instance


def run(instance: OnnxRuntimeInstance, requests: Sequence[InferRequest]) -> list[dict[str, Array]]:
    return [arrays(result) for result in instance.execute(requests).results]


def rows(*lengths: int) -> list[InferRequest]:
    return [request_of(X=np.arange(1, length + 1, dtype="f4")[None]) for length in lengths]


def test_requests_of_different_lengths_run_as_one_batch(tmp_path: Path) -> None:
    instance = make(tmp_path, sums(), SUMS)

    together = run(instance, rows(3, 1, 0, 5))

    assert [answer["SUM"].tolist() for answer in together] == [[[6.0]], [[1.0]], [[0.0]], [[15.0]]]
    assert [answer["DOUBLE"].tolist() for answer in together[:2]] == [[[2.0, 4.0, 6.0]], [[2.0]]]
    assert together[2]["DOUBLE"].shape == (1, 0)


def test_a_batch_is_answered_as_its_requests_alone_are(tmp_path: Path) -> None:
    instance = make(tmp_path, sums(), SUMS)
    requests = rows(4, 2, 7)

    together = run(instance, requests)
    alone = [run(instance, [each])[0] for each in requests]

    for one, other in zip(together, alone, strict=True):
        for name in ("SUM", "DOUBLE"):
            np.testing.assert_array_equal(one[name], other[name])


def shapes_model() -> bytes:
    graph = GraphWriter()
    graph.input("X", FP32, ("n",))
    graph.input("SHAPES", FP32, ("b", 2))
    graph.input("FLAT", INT32, ("m",))
    graph.input("COUNT", INT32, ("k",))
    graph.input("LONGEST", FP32, ("l",))
    graph.input("Z", FP32, ("b", 1))
    graph.weight("two", INT64, np.array([-1, 2]))
    graph.weight("one", INT64, np.array([-1, 1]))
    graph.node("Reshape", ["FLAT", "two"], "flat")
    graph.node("Reshape", ["COUNT", "one"], "count")
    graph.node("Shape", ["LONGEST"], "size")
    graph.node("Cast", ["size"], "longest", to=6)
    graph.node("Add", ["flat", "longest"], "MORE")
    graph.node("Identity", ["SHAPES"], "OUT")
    graph.node("Identity", ["count"], "COUNTED")
    graph.output("OUT", FP32, ("b", 2))
    graph.output("MORE", INT32, ("b", 2))
    graph.output("COUNTED", INT32, ("b", 1))
    return graph.model()


SHAPES = replace(
    SUMS,
    input=(
        ModelInput("X", FP32, dims=(-1, -1), allow_ragged_batch=True),
        ModelInput("Z", FP32, dims=(1,)),
    ),
    output=(ModelOutput("OUT", FP32, (2,)), ModelOutput("MORE", INT32, (2,)), ModelOutput("COUNTED", INT32, (1,))),
    batch_input=(
        BatchInput(BatchInputKind.BATCH_ITEM_SHAPE, ("SHAPES",), FP32, ("X",)),
        BatchInput(BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN, ("FLAT",), INT32, ("X",)),
        BatchInput(BatchInputKind.BATCH_ELEMENT_COUNT, ("COUNT",), INT32, ("X",)),
        BatchInput(BatchInputKind.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE, ("LONGEST",), FP32, ("X",)),
    ),
    batch_output=(),
)


def test_a_model_is_told_the_shapes_in_its_batch(tmp_path: Path) -> None:
    instance = make(tmp_path, shapes_model(), SHAPES)
    zero = np.zeros((1, 1), "f4")

    answers = run(instance, [request_of(X=np.zeros((1, *shape), "f4"), Z=zero) for shape in ((2, 3), (1, 4))])

    assert [answer["OUT"].tolist() for answer in answers] == [[[2.0, 3.0]], [[1.0, 4.0]]]
    assert [answer["MORE"].tolist() for answer in answers] == [[[8, 9]], [[7, 10]]]
    assert [answer["COUNTED"].tolist() for answer in answers] == [[[6]], [[4]]]


def test_the_shapes_are_those_after_reshape(tmp_path: Path) -> None:
    given = replace(SHAPES.input[0], dims=(-1, 2, 3), reshape=Reshape((-1, 6)))
    instance = make(tmp_path, shapes_model(), replace(SHAPES, input=(given, SHAPES.input[1])))

    (answer,) = run(instance, [request_of(X=np.zeros((1, 5, 2, 3), "f4"), Z=np.zeros((1, 1), "f4"))])

    assert answer["OUT"].tolist() == [[5.0, 6.0]]


def test_a_source_that_is_left_out_is_missed_by_name(tmp_path: Path) -> None:
    instance = make(tmp_path, sums(), SUMS)

    with pytest.raises(ServingError, match="input 'X' cannot be left out"):
        instance.execute([request_of()])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            replace(SUMS, batch_input=(replace(SUMS.batch_input[0], target_name=("OTHER",)),)),
            "batch input 'OTHER' is not an input of the model",
        ),
        (
            replace(SUMS, batch_input=(replace(SUMS.batch_input[0], data_type=FP32),)),
            "batch input 'OFFSETS' is TYPE_FP32, model provides TYPE_INT32",
        ),
        (
            replace(SUMS, input=(*SUMS.input, ModelInput("OFFSETS", INT32, dims=(-1,)))),
            "batch input 'OFFSETS' is an input of the configuration, too",
        ),
        (replace(SUMS, batch_output=()), "tensor 'DOUBLE': the model expects 1 dimensions"),
        (
            replace(SUMS, batch_output=(BatchOutput(("DOUBLE", "SUM"), source_input=("X",)),)),
            "'SUM' is one array of all elements, shape [-1]; model provides [-1, 1]",
        ),
        (
            replace(SUMS, input=(replace(SUMS.input[0], allow_ragged_batch=False),)),
            "tensor 'X': the model expects 1 dimensions",
        ),
    ],
)
def test_what_the_model_does_not_have_is_refused_at_load(tmp_path: Path, config: ModelConfig, message: str) -> None:
    with pytest.raises(ServingError) as caught:
        make(tmp_path, sums(), config)

    assert message in str(caught.value)
