"""The TensorFlow Lite backend."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from tests.support import tflite_models
from tests.support.backends import ask, assert_close, complete_wholly, request_of, version_of
from tests.support.backends import load as load_by
from tests.support.tflite_models import OPERATORS, Graph, mlp, mlp_expected, unary, write

from charonia.config.kinds import InstanceKind
from charonia.config.model import (
    Accelerator,
    ExecutionAccelerators,
    InstanceGroup,
    ModelConfig,
    ModelInput,
    ModelOutput,
    Optimization,
)
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.server.backends.api import ModelFiles, Placement
from charonia.server.backends.tflite import backend as tflite_backend
from charonia.server.backends.tflite.backend import TfliteBackend
from charonia.testing.backend_suite import BackendCase, BackendSuite

FP32 = DataType.FP32
complete, load = partial(complete_wholly, TfliteBackend), partial(load_by, TfliteBackend)


def files_of(tmp_path: Path, content: bytes) -> ModelFiles:
    return version_of(tmp_path / "m", model_tflite=content)


def rows(seed: int, size: int) -> InferRequest:
    return request_of(x=np.random.default_rng(seed).random((size, 16), np.float32))


def ids(seed: int, size: int, most: int = 9) -> InferRequest:
    values = np.random.default_rng(seed).integers(0, most, (size, 3)).astype(np.int32)
    return request_of(ids=values)


class TestPerceptron(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        files = files_of(tmp_path, mlp())
        config = complete(files, ModelConfig(name="m", max_batch_size=8)).config
        return BackendCase(TfliteBackend, files, config, rows)


class TestLookUp(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        tensors = [
            tflite_models.Tensor("table", (9, 4), value=np.random.default_rng(0).random((9, 4), np.float32)),
            tflite_models.Tensor("ids", (-1, 3), "int32"),
            tflite_models.Tensor("rows", (-1, 3, 4)),
        ]
        content = write(Graph(tensors, [(OPERATORS.GATHER, ["table", "ids"], ["rows"])], ["ids"], ["rows"]))
        files = files_of(tmp_path, content)
        config = complete(files, ModelConfig(name="m", max_batch_size=8)).config
        bad = request_of(ids=np.full((1, 3), 99, np.int32))
        return BackendCase(TfliteBackend, files, config, ids, bad_request=lambda: bad)


def test_everything_is_completed_from_the_signature(tmp_path: Path) -> None:
    files = files_of(tmp_path, mlp())

    config = complete(files).config

    assert config.max_batch_size == 4
    assert config.input == (ModelInput("x", FP32, dims=(16,)),)
    assert config.output == (ModelOutput("scores", FP32, (4,)),)
    x = np.random.default_rng(0).random((3, 16), np.float32)
    assert_close(ask(load(files, config), x=x)["scores"], mlp_expected(x))


def test_a_configuration_may_use_the_names_of_the_tensors(tmp_path: Path) -> None:
    config = ModelConfig(
        name="m",
        input=(ModelInput("serving_default_x:0", FP32, dims=(-1, 16)),),
        output=(ModelOutput("PartitionedCall:0", FP32, (-1, 4)),),
    )
    x = np.random.default_rng(0).random((2, 16), np.float32)

    outputs = ask(load(files_of(tmp_path, mlp()), config), **{"serving_default_x:0": x})

    assert_close(outputs["PartitionedCall:0"], mlp_expected(x))


def test_a_file_without_a_signature_has_the_names_of_its_tensors(tmp_path: Path) -> None:
    config = complete(files_of(tmp_path, mlp(signature=""))).config

    assert (config.input[0].name, config.output[0].name) == ("serving_default_x:0", "PartitionedCall:0")


def test_a_model_made_for_one_row_batches_where_the_configuration_says_so(tmp_path: Path) -> None:
    files = files_of(tmp_path, mlp(batch=1))
    x = np.random.default_rng(0).random((5, 16), np.float32)

    assert complete(files).config.max_batch_size == 0
    config = complete(files, ModelConfig(name="m", max_batch_size=8)).config

    assert_close(ask(load(files, config), x=x)["scores"], mlp_expected(x))


def test_a_model_that_cannot_have_another_batch_size_is_refused(tmp_path: Path) -> None:
    weights = tflite_models.Tensor("w", (2, 4), value=np.ones((2, 4), np.float32))
    tensors = [tflite_models.Tensor("a", (2, 4)), weights, tflite_models.Tensor("r", (2, 4))]
    content = write(Graph(tensors, [(OPERATORS.ADD, ["a", "w"], ["r"])], ["a"], ["r"]))

    with pytest.raises(ServingError, match="first dimension is not variable in 'a'"):
        complete(files_of(tmp_path, content), ModelConfig(name="m", max_batch_size=8))


def test_one_of_several_signatures_is_named_by_a_parameter(tmp_path: Path) -> None:
    add = tflite_models.binary(OPERATORS.ADD, signature="add")
    files = files_of(tmp_path, write(add, tflite_models.binary(OPERATORS.MUL, signature="mul")))
    arrays = {"a": np.full((1, 2), 3, np.float32), "b": np.full((1, 2), 4, np.float32)}

    for name, value in (("add", 7), ("mul", 12)):
        config = complete(files, ModelConfig(name="m", parameters={"SIGNATURE": name})).config
        assert ask(load(files, config), **arrays)["result"].tolist() == [[value, value]]
    with pytest.raises(ServingError, match="has no signature 'serving_default'") as caught:
        complete(files)
    assert "SIGNATURE names one of add, mul" in caught.value.hint


def test_quantised_tensors_are_passed_as_they_are_and_explained(tmp_path: Path) -> None:
    q, r = (tflite_models.Tensor(name, (-1, 4), "int8", scale=0.5, zero_point=-10) for name in ("q", "r"))
    files = files_of(tmp_path, unary(OPERATORS.RELU, q, r))

    done = complete(files)

    assert done.config.input[0].data_type is DataType.INT8
    assert "input 'q': quantised, a number q stands for 0.5 * (q - -10)" in done.notes
    outputs = ask(load(files, done.config), q=np.array([[-128, -11, 0, 100]], np.int8))
    assert outputs["r"].tolist() == [[-10, -10, 0, 100]]


def test_strings_are_bytes(tmp_path: Path) -> None:
    tensors = [
        tflite_models.Tensor("texts", (-1,), "string"),
        tflite_models.Tensor("zero", (1,), "int32", value=np.array([0], np.int32)),
        tflite_models.Tensor("result", (-1,), "string"),
    ]
    content = write(Graph(tensors, [(OPERATORS.GATHER, ["texts", "zero"], ["result"])], ["texts"], ["result"]))
    files = files_of(tmp_path, content)
    config = replace(complete(files).config, max_batch_size=0, dynamic_batching=None)
    config = replace(
        config,
        input=(ModelInput("texts", DataType.BYTES, dims=(-1,)),),
        output=(ModelOutput("result", DataType.BYTES, (-1,)),),
    )

    texts = np.array([b"a\0\xff", b"b"], object)

    assert ask(load(files, config), texts=texts)["result"].tolist() == [b"a\0\xff"]


def test_scalars_are_served(tmp_path: Path) -> None:
    files = files_of(tmp_path, write(tflite_models.binary(shape=())))
    config = complete(files).config

    arrays = {"a": np.array([3], np.float32), "b": np.array([4], np.float32)}

    assert ask(load(files, config), **arrays)["result"].tolist() == [7]


def test_threads_follow_the_budget_unless_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Recorded(Interpreter):  # type: ignore[misc] # it has no types
        def __init__(self, model_content: bytes, num_threads: int) -> None:
            asked.append(num_threads)
            super().__init__(model_content=model_content, num_threads=num_threads)

    monkeypatch.setattr(tflite_backend, "Interpreter", Recorded)
    files = files_of(tmp_path, mlp())
    config = complete(files).config
    xnnpack = Optimization(
        execution_accelerators=ExecutionAccelerators(
            cpu_execution_accelerator=(Accelerator("xnnpack", {"num_threads": "3"}),)
        )
    )

    for change, threads in (({}, 5), ({"parameters": {"tflite_num_threads": "2"}}, 2), ({"optimization": xnnpack}, 3)):
        place = Placement("m_0", InstanceKind.KIND_CPU, 0, 5)
        load(files, replace(config, **change), place=place)
        assert asked[-1] == threads


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": {"tflite_num_threads": "many"}}, "tflite_num_threads.*expected a whole number"),
        ({"parameters": {"SIGNATURE": "other"}}, "has no signature 'other'"),
        ({"instance_group": (InstanceGroup(kind=InstanceKind.KIND_GPU),)}, "no instances of KIND_GPU"),
        ({"input": (ModelInput("y", FP32, dims=(16,)),)}, "unexpected inference input 'y'"),
        ({"input": (ModelInput("x", FP32, dims=(17,)),)}, "the model expects shape"),
        ({"input": (ModelInput("x", DataType.INT8, dims=(16,)),)}, "configuration expects datatype TYPE_INT8"),
        (
            {
                "optimization": Optimization(
                    execution_accelerators=ExecutionAccelerators(cpu_execution_accelerator=(Accelerator("armnn"),))
                )
            },
            "expected xnnpack, which is always on, got 'armnn'",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    files = files_of(tmp_path, mlp())
    config = replace(complete(files).config, **change)  # type: ignore[arg-type]

    with pytest.raises(ServingError, match=message):
        load(files, config)


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b"not a model" * 20, "not a valid Flatbuffer", "not a TensorFlow Lite model"),
        (mlp()[:300], "not a valid Flatbuffer", "is incomplete"),
        (mlp().replace(b"TFL3", b"TFL9"), "not a valid Flatbuffer", "not a TensorFlow Lite model"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "not a valid Flatbuffer", "git lfs pull"),
        (
            unary(OPERATORS.CUSTOM, tflite_models.Tensor("a", (1, 4)), tflite_models.Tensor("b", (1, 4))),
            "unresolved custom op: Nope",
            "built-in operators only",
        ),
        (
            unary(
                OPERATORS.RELU,
                tflite_models.Tensor("a", (1, 4), "complex64"),
                tflite_models.Tensor("b", (1, 4), "complex64"),
            ),
            "tensor 'a' is complex64, which cannot be sent",
            "",
        ),
    ],
    ids=["garbage", "truncated", "version", "lfs", "operator", "datatype"],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, content: bytes, message: str, hint: str) -> None:
    with pytest.raises(ServingError, match=message) as caught:
        complete(files_of(tmp_path, content))

    assert caught.value.code in (Code.INVALID_ARG, Code.UNSUPPORTED)
    assert hint in caught.value.hint


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    files = files_of(tmp_path, mlp())
    (files.version_dir / "model.tflite").write_bytes(b"")

    with pytest.raises(ServingError, match="the file is empty"):
        complete(files)


def test_a_batch_of_another_size_than_the_last_is_computed(tmp_path: Path) -> None:
    files = files_of(tmp_path, mlp())
    instance = load(files, complete(files).config)
    for size in (1, 3, 3, 2, 1):
        x = np.random.default_rng(size).random((size, 16), np.float32)
        assert_close(ask(instance, x=x)["scores"], mlp_expected(x))


def test_not_a_number_stays_one(tmp_path: Path) -> None:
    files = files_of(tmp_path, write(tflite_models.binary()))
    config = complete(files).config

    outputs = ask(load(files, config), a=np.array([[np.nan, 1]], np.float32), b=np.ones((1, 2), np.float32))

    np.testing.assert_array_equal(outputs["result"], [[np.nan, 2]])


def test_inputs_that_do_not_fit_together_are_an_error_of_that_request(tmp_path: Path) -> None:
    files = files_of(tmp_path, write(tflite_models.binary()))
    instance = load(files, complete(files).config)

    with pytest.raises(ServingError, match="LiteRT failed") as caught:
        ask(instance, a=np.ones((1, 3), np.float32), b=np.ones((1, 4), np.float32))

    assert "the inputs were a [1, 3], b [1, 4]" in caught.value.hint
    ones = np.ones((1, 3), np.float32)
    assert ask(instance, a=ones, b=ones)["result"].tolist() == [[2, 2, 2]]
