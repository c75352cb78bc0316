import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.support import models
from tests.support.backends import ask, assert_close, load, request, request_of, version_of
from tests.support.backends import complete as complete_by
from tests.support.backends import config_of as config_by
from tests.support.onnx_writer import GraphWriter

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOperations, ModelOutput, Reshape
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Array
from charonia.server.backends.api import BackendSettings, Completion, Execution, ModelFiles, Placement
from charonia.server.backends.onnxruntime import backend
from charonia.server.backends.onnxruntime.backend import OnnxRuntimeBackend, Session, read_external, without_shape
from charonia.server.backends.onnxruntime.options import TENSORRT, Provider, SessionPlan
from charonia.testing.backend_suite import BackendCase, BackendSuite, arrays

FP32, INT64, BYTES = DataType.FP32, DataType.INT64, DataType.BYTES
config_of = partial(config_by, backend="onnxruntime")
complete, make = partial(complete_by, OnnxRuntimeBackend), partial(load, OnnxRuntimeBackend)


def files_of(tmp_path: Path, content: bytes, file_name: str = "model.onnx") -> ModelFiles:
    return version_of(tmp_path / "m", **{file_name: content})


def values(execution: Execution, index: int = 0) -> dict[str, Array]:
    return arrays(execution.results[index])


MLP = config_of({"input": (FP32, (128,))}, {"output": (FP32, (10,))})
ADD_SUB = config_of(
    {"INPUT0": (FP32, (16,)), "INPUT1": (FP32, (16,))}, {"OUTPUT0": (FP32, (16,)), "OUTPUT1": (FP32, (16,))}
)
TOKENS = config_of({"ids": (INT64, (-1,))}, {"mean": (FP32, (8,))})


def identity_config(datatype: DataType, dims: tuple[int, ...] = (4,), max_batch_size: int = 8) -> ModelConfig:
    return config_of({"INPUT0": (datatype, dims)}, {"OUTPUT0": (datatype, dims)}, max_batch_size)


def mlp_request(seed: int, size: int) -> InferRequest:
    return request_of(input=np.random.default_rng(seed).random((size, 128), np.float32))


def token_request(seed: int, size: int) -> InferRequest:
    return request_of(ids=np.random.default_rng(seed).integers(0, 100, (size, 5)))


def text_request(seed: int, size: int) -> InferRequest:
    texts = np.array([["", f"e\u00e9{seed}\0", "\U0001f41a", "x" * seed]] * size, object)
    return request({"INPUT0": (BYTES, np.vectorize(str.encode, otypes=[object])(texts))})


def bad_text() -> InferRequest:
    return request({"INPUT0": (BYTES, np.array([[b"a", b"b", b"\xff", b"c"]], object))})


def bad_token() -> InferRequest:
    return request_of(ids=np.full((1, 5), 1000))


class TestPerceptron(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        return BackendCase(OnnxRuntimeBackend, files_of(tmp_path, models.mlp()), MLP, mlp_request)


class TestVariableLength(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        files = files_of(tmp_path, models.token_means())
        return BackendCase(OnnxRuntimeBackend, files, TOKENS, token_request, bad_token)


class TestStrings(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        files = files_of(tmp_path, models.identity(BYTES, (4,)))
        return BackendCase(OnnxRuntimeBackend, files, identity_config(BYTES), text_request, bad_text)


@pytest.mark.parametrize("datatype", DataType)
@pytest.mark.parametrize("batches", [True, False])
def test_every_datatype_passes_unchanged(tmp_path: Path, datatype: DataType, batches: bool) -> None:
    config = identity_config(datatype, max_batch_size=8 if batches else 0)
    shape = (3, 4) if batches else (4,)
    numbers = np.arange(np.prod(shape)).reshape(shape)
    array = numbers.astype(str).astype("S").astype(object) if datatype is BYTES else numbers.astype(datatype.numpy)
    files = files_of(tmp_path, models.identity(datatype, (4,), batches=batches))

    answer = ask(make(files, config), request({"INPUT0": (datatype, array)}))["OUTPUT0"]

    assert answer.dtype == datatype.numpy
    np.testing.assert_array_equal(answer, array)


def test_an_empty_tensor_passes(tmp_path: Path) -> None:
    for datatype in (FP32, BYTES, DataType.BF16):
        files = files_of(tmp_path, models.identity(datatype, ("n",)))
        empty = np.empty((2, 0), datatype.numpy)

        answer = ask(make(files, identity_config(datatype, (-1,))), request({"INPUT0": (datatype, empty)}))

        assert answer["OUTPUT0"].shape == (2, 0)


def test_only_the_outputs_that_some_request_asked_for_are_computed(tmp_path: Path) -> None:
    instance = make(files_of(tmp_path, models.add_sub()), ADD_SUB)
    ones = np.ones((1, 16), np.float32)
    first, second, both = (request_of(*names, INPUT0=ones, INPUT1=ones) for names in (["OUTPUT1"], ["OUTPUT0"], []))

    assert list(ask(instance, first, first)) == ["OUTPUT1"]
    assert list(ask(instance, first, second)) == list(ask(instance, first, both)) == ["OUTPUT0", "OUTPUT1"]


def test_shapes_of_the_configuration_become_those_of_the_model_and_back(tmp_path: Path) -> None:
    config = config_of({"INPUT0": (FP32, (2, -1, 3))}, {"OUTPUT0": (FP32, (3, -1, 2))})
    config = replace(
        config,
        input=(replace(config.input[0], reshape=Reshape((6, -1))),),
        output=(replace(config.output[0], reshape=Reshape((6, -1))),),
    )
    instance = make(files_of(tmp_path, models.identity(FP32, (6, "n"))), config)
    array = np.arange(48, dtype=np.float32).reshape(2, 2, 4, 3)

    execution = instance.execute([request_of(INPUT0=array), request_of(INPUT0=array[:1])])

    np.testing.assert_array_equal(values(execution)["OUTPUT0"], array.reshape(2, 3, 4, 2))
    assert values(execution, 1)["OUTPUT0"].shape == (1, 3, 4, 2)


@pytest.mark.parametrize("batches", [True, False])
def test_a_scalar_is_served_as_one_element(tmp_path: Path, batches: bool) -> None:
    files = files_of(tmp_path, models.identity(FP32, (), batches=batches))
    config = complete(files).config
    config = replace(config, instance_group=MLP.instance_group)

    assert config.input[0].dims == (1,)
    assert config.input[0].reshape == Reshape(())
    array = np.array([[5]], np.float32) if batches else np.array([5], np.float32)
    answer = ask(make(files, config), INPUT0=array)["OUTPUT0"]

    np.testing.assert_array_equal(answer, array)


def test_an_input_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    config = config_of({"x": (FP32, (4,)), "scale": (FP32, (1,))}, {"y": (FP32, (4,))}, 0)
    config = replace(config, input=(config.input[0], replace(config.input[1], optional=True)))
    instance = make(files_of(tmp_path, models.scaled(2)), config)
    ones = np.ones(4, np.float32)

    assert ask(instance, x=ones)["y"].tolist() == [2] * 4
    assert ask(instance, x=ones, scale=np.array([7], np.float32))["y"].tolist() == [7] * 4


def test_requests_to_a_model_without_batching_run_one_by_one(tmp_path: Path) -> None:
    instance = make(files_of(tmp_path, models.identity(FP32, (4,), batches=False)), identity_config(FP32, (4,), 0))
    given = [np.full(4, n, np.float32) for n in range(3)]

    execution = instance.execute([request_of(INPUT0=array) for array in given])

    for index, array in enumerate(given):
        np.testing.assert_array_equal(values(execution, index)["OUTPUT0"], array)


@pytest.mark.parametrize(
    ("content", "config", "bad", "message"),
    [
        (models.token_means(), TOKENS, bad_token(), "indices element out of data bounds"),
        (
            models.identity(BYTES, (4,)),
            identity_config(BYTES),
            bad_text(),
            "input 'INPUT0': element 2 is not UTF-8 (byte 0 is 0xff)",
        ),
    ],
)
def test_what_is_wrong_with_an_input_reaches_the_caller_in_one_line(
    tmp_path: Path, content: bytes, config: ModelConfig, bad: InferRequest, message: str
) -> None:
    instance = make(files_of(tmp_path, content), config)

    with pytest.raises(ServingError) as caught:
        instance.execute([bad])

    assert caught.value.code is Code.INVALID_ARG
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert "ONNXRuntimeError" not in caught.value.message


def test_a_model_that_mixes_the_rows_of_a_batch_is_found_out(tmp_path: Path) -> None:
    graph = GraphWriter()
    graph.input("x", FP32, ["n", 4])
    graph.node("Concat", ["x", "x"], "y", axis=0)
    graph.output("y", FP32, ["k", 4])
    instance = make(files_of(tmp_path, graph.model()), config_of({"x": (FP32, (4,))}, {"y": (FP32, (4,))}))

    with pytest.raises(
        ServingError, match="output 'y': expected 3 rows for a batch of 3, got an array of shape"
    ) as caught:
        instance.execute([request_of(x=np.ones((3, 4), np.float32))])

    assert caught.value.code is Code.INTERNAL


def test_sizes_that_only_the_network_knows_are_told(tmp_path: Path) -> None:
    graph = GraphWriter()
    graph.input("a", FP32, ["n", "k"])
    graph.input("b", FP32, ["n", "m"])
    graph.node("Add", ["a", "b"], "y")
    graph.output("y", FP32, ["n", "k"])
    config = config_of({"a": (FP32, (-1,)), "b": (FP32, (-1,))}, {"y": (FP32, (-1,))})
    instance = make(files_of(tmp_path, graph.model()), config)

    with pytest.raises(ServingError) as caught:
        ask(instance, a=np.ones((1, 2), np.float32), b=np.ones((1, 3), np.float32))

    assert caught.value.code is Code.INTERNAL
    assert (
        caught.value.hint
        == "the inputs were a [1, 2], b [1, 3]; a network may need other sizes than its signature says"
    )


def reshaping() -> bytes:
    """`y` is `x` [batch, 4] in the shape that `shape` says: ONNX Runtime cannot know its rank."""
    graph = GraphWriter()
    graph.input("x", FP32, ["b", 4])
    graph.input("shape", INT64, ["b", "r"])
    graph.node("ReduceMax", ["shape"], "target", axes=[0], keepdims=0)
    graph.node("Reshape", ["x", "target"], "y")
    graph.output("y", FP32, None)
    return graph.model()


RESHAPING = config_of({"x": (FP32, (4,)), "shape": (INT64, (-1,))}, {"y": (FP32, (2, 2))})


def reshaping_request(*shape: int) -> InferRequest:
    return request_of(x=np.ones((1, 4), np.float32), shape=np.array([shape]))


def test_outputs_of_unknown_rank_are_as_the_configuration_says(tmp_path: Path) -> None:
    instance = make(files_of(tmp_path, reshaping()), RESHAPING)

    assert ask(instance, reshaping_request(1, 2, 2))["y"].shape == (1, 2, 2)


def test_an_output_that_cannot_get_its_configured_shape_is_named(tmp_path: Path) -> None:
    config = replace(RESHAPING, output=(ModelOutput("y", FP32, (4,), Reshape((2, 2))),))
    instance = make(files_of(tmp_path, reshaping()), config)

    assert ask(instance, reshaping_request(1, 2, 2))["y"].shape == (1, 4)
    with pytest.raises(ServingError, match=r"'y': expected an array of shape \['batch', 2, 2\], got \[1, 4\]"):
        instance.execute([reshaping_request(1, 4)])


# What is completed from the model.


def test_a_model_alone_is_enough(tmp_path: Path) -> None:
    completion = complete(files_of(tmp_path, models.token_means()))

    assert completion.config.max_batch_size == 4
    assert completion.config.input == (ModelInput("ids", INT64, dims=(-1,)),)
    assert completion.config.output == (ModelOutput("mean", FP32, (8,)),)
    assert completion.config.dynamic_batching is not None
    assert any("max_batch_size: 4" in note for note in completion.notes)


def test_what_is_configured_stays_and_the_model_is_not_read(tmp_path: Path) -> None:
    completion = complete(files_of(tmp_path, b"no model"), MLP)

    assert completion == Completion(MLP)


def test_inputs_with_defaults_are_not_asked_of_clients(tmp_path: Path) -> None:
    completion = complete(files_of(tmp_path, models.scaled()))

    assert [i.name for i in completion.config.input] == ["x"]


def test_a_model_that_does_not_batch_is_not_made_to(tmp_path: Path) -> None:
    files = files_of(tmp_path, models.identity(batches=False))

    assert complete(files).config.max_batch_size == 0
    with pytest.raises(ServingError, match="does not support batching while non-zero max_batch_size"):
        complete(files, ModelConfig(name="m", max_batch_size=4))


def test_an_output_that_is_no_tensor_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    graph = GraphWriter()
    graph.input("x", FP32, ["b", 4])
    graph.node("Identity", ["x"], "y")
    graph.node("SequenceConstruct", ["x"], "all")
    graph.output("y", FP32, ["b", 4])
    content = graph.model()
    model = onnx.load_model_from_string(content)
    tensor = onnx.helper.make_tensor_type_proto(1, ["b", 4])
    model.graph.output.append(onnx.helper.make_value_info("all", onnx.helper.make_sequence_type_proto(tensor)))

    completion = complete(files_of(tmp_path, model.SerializeToString()))

    assert [o.name for o in completion.config.output] == ["y"]
    assert "output 'all': left out, as seq(tensor(float)) cannot be sent" in completion.notes
    assert "model 'm': output 'all': left out, as seq(tensor(float)) cannot be sent" in caplog.messages


def with_probabilities(content: bytes) -> onnx.ModelProto:
    """Return the model with one more output: a sequence of maps, as scikit-learn's classifiers have."""
    model = onnx.load_model_from_string(content)
    graph = model.graph
    graph.node.append(
        onnx.helper.make_node("ZipMap", ["x"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2, 3])
    )
    kind = onnx.helper.make_map_type_proto(onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(1, []))
    graph.output.append(onnx.helper.make_value_info("maps", onnx.helper.make_sequence_type_proto(kind)))
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 2))
    return model


def named(shape: Sequence[int | str], *outputs: Sequence[int | str]) -> bytes:
    """Return a model with an output for each of these shapes: its input as it is, or transposed."""
    graph = GraphWriter()
    graph.input("x", FP32, shape)
    for index, out in enumerate(outputs):
        operator = "Identity" if out == shape else "Transpose"
        graph.output(graph.node(operator, ["x"], f"y{index}"), FP32, out)
    return graph.model()


def test_an_output_that_is_no_tensor_cannot_be_configured(tmp_path: Path) -> None:
    content = with_probabilities(named(["b", 4], ["b", 4])).SerializeToString()

    with pytest.raises(ServingError) as caught:
        make(files_of(tmp_path, content), config_of({"x": (FP32, (4,))}, {"y0": (FP32, (4,)), "maps": (FP32, (4,))}))

    assert caught.value.message == (
        "model 'm': output[1].name: output 'maps' is seq(map(int64,tensor(float))), which cannot be sent; "
        "scikit-learn converters write the probabilities as a tensor with zipmap=False"
    )


def test_a_model_without_an_output_that_can_be_sent_is_refused(tmp_path: Path) -> None:
    model = with_probabilities(named(["b", 4], ["b", 4]))
    del model.graph.output[0]

    with pytest.raises(ServingError, match=r"no output that can be sent: 'maps' is seq\(map") as caught:
        complete(files_of(tmp_path, model.SerializeToString()))

    assert (caught.value.code, "zipmap=False" in caught.value.hint) == (Code.UNSUPPORTED, True)


@pytest.mark.parametrize(
    ("shape", "outputs", "batch_size"),
    [
        (["n", "c"], [["c", "n"]], 0),  # a matrix: two requests in one batch would exchange their rows
        (["n", "c"], [["n", "c"]], 4),
        (["any", 3, "any"], [["any", 3, "any"]], 4),  # one name for all that is variable tells nothing
        (["b", "t"], [["b", "t"], ["t", "b"]], 0),
    ],
)
def test_a_first_dimension_that_is_a_later_one_elsewhere_is_no_batch(
    tmp_path: Path, shape: list[int | str], outputs: list[list[int | str]], batch_size: int
) -> None:
    files = files_of(tmp_path, named(shape, *outputs))

    completion = complete(files)

    assert completion.config.max_batch_size == batch_size
    assert any("is the first of one tensor and a later one" in n for n in completion.notes) == (batch_size == 0)
    assert complete(files, ModelConfig(name="m", max_batch_size=2)).config.max_batch_size == 2


def test_a_tensor_without_a_shape_is_completed_as_variable_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    graph = GraphWriter()
    graph.input("x", FP32, None)
    graph.input("known", FP32, ())
    graph.output(graph.node("Identity", ["x"], "y"), FP32, None)
    graph.output(graph.node("Identity", ["known"], "z"), FP32, None)
    files = files_of(tmp_path, graph.model())

    completion = complete(files)

    taken = [note for note in completion.notes if "states no shape" in note]
    sentence = "dims [ -1 ], as the model file states no shape; for tensors of another rank, configure `dims`"
    assert taken[0] == f"input 'x': {sentence}"
    assert {note.split(":")[0] for note in taken} == {"input 'x'", "output 'y'", "output 'z'"}
    assert f"model 'm': {taken[0]}" in caplog.messages
    config = replace(completion.config, instance_group=MLP.instance_group)
    assert [(each.dims, each.reshape is None) for each in config.input] == [((-1,), True), ((1,), False)]
    vector = np.arange(3, dtype=np.float32)
    answer = ask(make(files, config), x=vector, known=vector[:1])
    assert answer["y"].tolist() == [0, 1, 2]


def test_a_dimension_of_no_elements_is_served_as_a_variable_one(tmp_path: Path) -> None:
    files = files_of(tmp_path, named(["b", 0, 2], ["b", 0, 2]))
    completed = complete(files).config

    answer = ask(make(files, replace(completed, instance_group=MLP.instance_group)), x=np.zeros((3, 0, 2), np.float32))

    assert [tensor.dims for tensor in completed.input] == [(-1, 2)]
    assert answer["y0"].shape == (3, 0, 2)


# Models and configurations that are wrong.


@pytest.mark.parametrize("content", [b"garbage", b"\x08\x08", models.mlp()[:1000]])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    files = files_of(tmp_path, content)

    with pytest.raises(ServingError, match=r"cannot load model\.onnx: ") as completing:
        complete(files)
    with pytest.raises(ServingError, match=r"cannot load model\.onnx: "):
        make(files, MLP)

    assert completing.value.code is Code.INVALID_ARG
    assert str(tmp_path / "m" / "1") not in completing.value.message.replace(str(tmp_path / "m/1/model.onnx"), "")


def test_a_missing_file_is_named_with_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"has no file 1/model\.onnx") as caught:
        make(files_of(tmp_path, models.mlp(), "net.onnx"), MLP)

    assert "net.onnx" in caught.value.hint


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    files = files_of(tmp_path, models.mlp(), "net.onnx")
    (files.version_dir / "model.onnx").symlink_to("/missing.onnx")

    with pytest.raises(ServingError, match=r"has no file 1/model\.onnx") as caught:
        make(files, MLP)

    assert caught.value.hint == "it is a link to '/missing.onnx', which is not there"


@pytest.mark.parametrize("name", ["../1/model.onnx", "/etc/hostname"])
def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ServingError, match="must stay within the version's folder"):
        complete(files_of(tmp_path, models.mlp()), ModelConfig(name="m", default_model_filename=name))


def test_the_file_may_have_another_name_and_lie_in_a_folder(tmp_path: Path) -> None:
    named = files_of(tmp_path / "a", models.mlp(), "net.onnx")
    assert complete(named, ModelConfig(name="m", default_model_filename="net.onnx")).config.input

    inside = tmp_path / "b" / "m" / "1" / "model.onnx"
    inside.mkdir(parents=True)
    (inside / "model.onnx").write_bytes(models.mlp())
    assert complete(ModelFiles(tmp_path / "b" / "m", 1, inside.parent)).config.input


def test_weights_may_lie_in_a_file_of_their_own(tmp_path: Path) -> None:
    answer = ask(make(external(tmp_path), MLP), mlp_request(1, 2))["output"]

    expected = ask(make(files_of(tmp_path / "whole", models.mlp()), MLP), mlp_request(1, 2))["output"]
    assert_close(answer, expected)


def test_everything_that_contradicts_the_model_is_said_at_once(tmp_path: Path) -> None:
    config = config_of(
        {"INPUT0": (DataType.INT32, (16,)), "INPUT9": (FP32, (16,))},
        {"OUTPUT0": (FP32, (16, 2)), "OUTPUT1": (DataType.FP64, (16,))},
    )

    with pytest.raises(ServingError) as caught:
        make(files_of(tmp_path, models.add_sub()), config)

    message = caught.value.message
    assert "input[0].data_type" in message
    assert "unexpected inference input 'INPUT9', allowed inputs are: INPUT0, INPUT1" in message
    assert "output[0].dims" in message
    assert "output[1].data_type" in message
    assert "not configured" not in message  # one mistake, one problem


def test_what_only_the_optimiser_finds_out_about_an_output_contradicts_nothing(tmp_path: Path) -> None:
    graph = GraphWriter()
    x = graph.input("x", FP32, (4,))
    one = graph.weight("one", INT64, np.array([1, 1]))
    graph.node("Reshape", [x, graph.node("Add", [one, one], "two")], "y")
    graph.output("y", FP32, ("rows", "columns"))
    files = files_of(tmp_path, graph.model())
    completed = complete(files).config

    instance = make(files, replace(completed, instance_group=MLP.instance_group))
    answer = ask(instance, request_of("y", x=np.arange(4, dtype=np.float32)))

    assert [output.dims for output in completed.output] == [(-1, -1)]
    assert answer["y"].shape == (2, 2)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "`git lfs pull`"),
        (b"\n<!DOCTYPE html>\n<html>", "the file is an HTML page"),
        (b"\x1f\x8b\x08", "the file is compressed with gzip"),
        (b"PK\x03\x04", "the file is not an ONNX model, or is incomplete"),
    ],
)
def test_a_file_that_is_no_model_comes_with_what_to_do(tmp_path: Path, content: bytes, hint: str) -> None:
    files = files_of(tmp_path, models.add_sub())
    (files.version_dir / "model.onnx").write_bytes(content)

    with pytest.raises(ServingError, match=r"cannot load model\.onnx") as caught:
        complete(files)

    assert hint in caught.value.hint


def test_a_link_to_a_file_that_is_no_model_is_told_of_as_that_file(tmp_path: Path) -> None:
    files = files_of(tmp_path, models.add_sub())
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    (files.version_dir / "model.onnx").unlink()
    (files.version_dir / "model.onnx").symlink_to(tmp_path / "broken.onnx")

    with pytest.raises(ServingError) as caught:
        complete(files)

    assert f"Load model from {tmp_path.resolve()}/broken.onnx failed" in caught.value.message
    assert str(files.version_dir) not in caught.value.message


def external(tmp_path: Path) -> ModelFiles:
    """Return the perceptron with its weights in a file of their own, `weights`."""
    files = files_of(tmp_path, b"")
    model = onnx.load_from_string(models.mlp())
    onnx.save_model(
        model, str(files.version_dir / "model.onnx"), save_as_external_data=True, location="weights", size_threshold=0
    )
    return files


@pytest.mark.parametrize(
    ("content", "problem", "hint"),
    [
        (None, "", "the weights are in a separate file, which belongs beside the model"),
        (
            b"version https://git-lfs\n",
            "External initializer: ",
            "the file of the weights is incomplete, or a Git LFS pointer",
        ),
    ],
)
def test_weights_that_are_not_all_there_are_told_of(
    tmp_path: Path, content: bytes | None, problem: str, hint: str
) -> None:
    files = external(tmp_path)
    (files.version_dir / "weights").unlink()
    if content is not None:
        (files.version_dir / "weights").write_bytes(content)

    with pytest.raises(ServingError, match=rf"cannot load model\.onnx: {problem}") as caught:
        complete(files)

    assert caught.value.hint == hint


@pytest.mark.skipif(
    not hasattr(onnxruntime.SessionOptions, "add_external_initializers_from_files_in_memory"),
    reason="needs a newer ONNX Runtime",
)
class TestWeightsInAFileOfTheirOwn:
    @pytest.mark.parametrize("change", ["cut", "overwritten"])
    def test_a_file_that_changes_in_place_does_not_touch_the_model_that_is_served(
        self, tmp_path: Path, change: str
    ) -> None:
        files = external(tmp_path)
        instance = make(files, MLP)
        expected = ask(instance, mlp_request(1, 2))["output"]
        weights = files.version_dir / "weights"
        size = weights.stat().st_size

        # A model that maps the file would end this process when it is cut.
        with weights.open("r+b") as file:
            if change == "overwritten":
                file.write(bytes(size))
            file.flush()
            maps = Path("/proc/self/maps")
            assert not maps.exists() or str(weights) not in maps.read_text()
            file.truncate(0 if change == "cut" else size)

        assert_close(ask(instance, mlp_request(1, 2))["output"], expected)

    def test_the_file_may_be_a_link_to_another_folder(self, tmp_path: Path) -> None:
        files = external(tmp_path)
        weights = files.version_dir / "weights"
        weights.rename(tmp_path / "elsewhere")
        weights.symlink_to(tmp_path / "elsewhere")

        assert complete(files).config.input
        make(files, MLP)

    def test_larger_ones_stay_with_onnx_runtime(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = external(tmp_path)
        monkeypatch.setattr(backend, "COPIED_BYTES_MAX", 1000)

        assert read_external(files.version_dir / "model.onnx") == {}
        make(files, MLP)


@pytest.mark.parametrize("location", ["../weights", "/etc/hostname", "gone"])
def test_weights_that_lie_elsewhere_are_left_to_onnx_runtime(tmp_path: Path, location: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "weights").write_bytes(b"secret")
    model = onnx.load_from_string(models.mlp())
    tensor = model.graph.initializer[0]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    path = tmp_path / "m" / "model.onnx"
    path.write_bytes(model.SerializeToString())

    assert read_external(path) == {}


@pytest.mark.parametrize("content", [b"", b"\x3a", b"\x3a\xff\x01", b"\x3e", b"\xff" * 20, models.mlp()[:-900]])
def test_a_file_that_is_no_model_names_no_weights(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)

    assert read_external(path) == {}
    assert without_shape(path) == frozenset()


def test_operators_that_nobody_knows_come_with_what_to_do(tmp_path: Path) -> None:
    graph = GraphWriter()
    graph.input("x", FP32, ["b", 4])
    graph.output(graph.node("NoSuchOperator", ["x"], "y"), FP32, ["b", 4])

    with pytest.raises(ServingError, match="NoSuchOperator"):
        complete(files_of(tmp_path, graph.model()))


def test_a_folder_in_the_place_of_the_file_tells_what_it_holds(tmp_path: Path) -> None:
    folder = tmp_path / "m" / "1" / "model.onnx"
    folder.mkdir(parents=True)
    (folder / "net.onnx").write_bytes(models.mlp())

    with pytest.raises(ServingError, match=r"has no file 1/model\.onnx/model\.onnx") as caught:
        complete(ModelFiles(tmp_path / "m", 1, tmp_path / "m" / "1"))

    assert caught.value.hint == "the folder holds net.onnx"


def test_a_gpu_needs_an_onnx_runtime_for_gpus(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="'m_0' of model 'm' needs ONNX Runtime's CUDAExecutionProvider") as caught:
        make(files_of(tmp_path, models.mlp()), MLP, place=Placement("m_0", InstanceKind.KIND_GPU, 0))

    assert "onnxruntime-gpu" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        (
            models.mlp(),
            replace(MLP, input=(replace(MLP.input[0], optional=True),)),
            r"input\[0\].optional: input 'input' has no default",
        ),
        (models.mlp(), replace(MLP, output=()), "output: none is configured; the model provides output"),
        (models.identity(FP32, (4,), batches=False), identity_config(FP32), "dimensions"),
        (
            models.mlp(),
            replace(MLP, parameters={"execution_mode": "5"}),
            r"parameters\['execution_mode'\]: expected one of 0, 1, got '5'",
        ),
        (
            models.mlp(),
            replace(
                MLP,
                cc_model_filenames={"7.5": "a.onnx"},
                instance_group=(InstanceGroup("m_0", InstanceKind.KIND_GPU, count=1, gpus=(0,)),),
            ),
            "cc_model_filenames",
        ),
        (
            models.mlp(),
            replace(MLP, max_batch_size=0),
            "max_batch_size: it is 0, and the dims of input, output have no batch dimension: set it to the largest",
        ),
        (models.mlp(), replace(MLP, model_operations=ModelOperations(("libnothing.so",))), r"libnothing\.so"),
    ],
)
def test_a_configuration_that_does_not_fit_the_model_is_refused(
    tmp_path: Path, content: bytes, config: ModelConfig, message: str
) -> None:
    with pytest.raises(ServingError, match=message):
        make(files_of(tmp_path, content), config)


def test_a_library_of_operators_is_taken_from_the_model_s_folder(tmp_path: Path) -> None:
    files = files_of(tmp_path, models.mlp())
    (files.model_dir / "ops.so").write_bytes(b"no library")
    config = replace(MLP, model_operations=ModelOperations(("ops.so",)))

    with pytest.raises(ServingError, match=re.escape(str(files.model_dir / "ops.so"))):
        make(files, config)


def test_a_provider_that_does_not_start_is_named(tmp_path: Path) -> None:
    path = files_of(tmp_path, models.mlp()).version_dir / "model.onnx"

    class Stepped:
        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onnxruntime.InferenceSession", lambda *args, **options: Stepped())
        with pytest.raises(ServingError, match="CUDAExecutionProvider is installed but does not start"):
            backend.open_session(path, SessionPlan(), threads=1, providers=[("CUDAExecutionProvider", {})])


@pytest.mark.parametrize(
    ("providers", "has_beneath", "called"),
    [
        (["CPUExecutionProvider"], True, "beneath"),
        (["CPUExecutionProvider"], False, "own"),
        (["CUDAExecutionProvider", "CPUExecutionProvider"], True, "own"),
    ],
)
def test_what_the_cpu_alone_computes_is_called_directly(providers: list[str], has_beneath: bool, called: str) -> None:
    class Beneath:
        def run(self) -> str:
            return "beneath"

    class Wrapped:
        def __init__(self) -> None:
            if has_beneath:
                self._sess = Beneath()

        def run(self) -> str:
            return "own"

        def get_providers(self) -> list[str]:
            return providers

    run: Any = backend.run_of(cast(Any, Wrapped()))

    assert run() == called


def test_an_input_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    content = models.identity()
    model = onnx.load_model_from_string(content)
    sequence = onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(1, ["b", 4]))
    model.graph.input.append(onnx.helper.make_value_info("all", sequence))

    with pytest.raises(ServingError, match=r"input 'all' is seq\(tensor\(float\)\), which cannot be sent"):
        complete(files_of(tmp_path, model.SerializeToString()))


def test_a_parameter_without_a_meaning_is_logged_with_the_likely_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(MLP, parameters={"intra_op_threads": "1"})

    with caplog.at_level(logging.WARNING):
        make(files_of(tmp_path, models.mlp()), config)

    assert "no parameter 'intra_op_threads'" in caplog.text
    assert "did you mean 'intra_op_thread_count'?" in caplog.text


@pytest.mark.parametrize(
    "parameters",
    [
        {"intra_op_thread_count": "2", "inter_op_thread_count": "2", "execution_mode": "1"},
        {"enable_mem_arena": "0", "enable_mem_pattern": "0"},
        {"memory.enable_memory_arena_shrinkage": "cpu:0"},
        {"session.use_device_allocator_for_initializers": "1", "session.set_denormal_as_zero": "1"},
        {"gpu_mem_limit": "1000000", "arena_extend_strategy": "1", "cudnn_conv_algo_search": "0"},
    ],
)
def test_a_model_runs_with_every_parameter(tmp_path: Path, parameters: dict[str, str]) -> None:
    files = files_of(tmp_path, models.mlp())
    expected = ask(make(files, MLP), mlp_request(1, 4))["output"]

    answer = ask(make(files, replace(MLP, parameters=parameters)), mlp_request(1, 4))["output"]

    assert_close(answer, expected)


def test_a_closed_instance_answers_with_an_error(tmp_path: Path) -> None:
    instance = make(files_of(tmp_path, models.mlp()), MLP)
    instance.close()

    with pytest.raises(ServingError, match="closed"):
        instance.execute([mlp_request(1, 1)])


# Threads and sessions.


def thread_count(tmp_path: Path, content: bytes, config: ModelConfig, threads: int) -> list[int]:
    opened: list[int] = []
    real = backend.open_session

    def spy(path: Path, plan: SessionPlan, *, threads: int, providers: Sequence[Provider], verbose: bool) -> Session:
        opened.append(threads)
        return real(path, plan, threads=threads, providers=providers, verbose=verbose)

    async def load() -> None:
        model = await OnnxRuntimeBackend().load(files_of(tmp_path, content), config, BackendSettings())
        count = sum(group.count for group in config.instance_group)
        placements = [Placement(f"m_{n}", InstanceKind.KIND_CPU, 0, threads) for n in range(count)]
        await asyncio.gather(*(model.create_instance(placement) for placement in placements))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "open_session", spy)
        asyncio.run(load())
    return opened


def big_matrix() -> bytes:
    return models.mlp((128, 4096, 1024, 10))


@pytest.mark.parametrize(
    ("count", "threads", "parameters", "expected"),
    [
        (1, 4, {}, [4]),
        (2, 4, {}, [7]),
        (3, 1, {}, [1]),
        (2, 4, {"intra_op_thread_count": "2"}, [3]),
        (1, 1, {"intra_op_thread_count": "2"}, [2]),
    ],
)
def test_instances_share_one_session_with_the_threads_of_all(
    tmp_path: Path, count: int, threads: int, parameters: dict[str, str], expected: list[int]
) -> None:
    groups = (InstanceGroup("m_0", InstanceKind.KIND_CPU, count=count),)
    config = replace(MLP, instance_group=groups, parameters=parameters, max_batch_size=64)

    assert thread_count(tmp_path, big_matrix(), config, threads) == expected


@pytest.mark.parametrize(
    ("content", "config", "opened"),
    [
        (models.mlp((128, 16, 10)), MLP, [2, 1]),  # it takes next to no time
        (models.token_means(), TOKENS, [2]),  # its shape is variable
    ],
)
def test_only_a_model_that_takes_next_to_no_time_runs_in_one_thread(
    tmp_path: Path, content: bytes, config: ModelConfig, opened: list[int]
) -> None:
    assert thread_count(tmp_path, content, config, 2) == opened


def test_the_memory_of_a_model_is_that_of_its_weights_once(tmp_path: Path) -> None:
    files = files_of(tmp_path, models.mlp())

    async def load() -> list[MemoryUsage]:
        model = await OnnxRuntimeBackend().load(files, MLP, BackendSettings())
        for _ in range(3):
            await model.create_instance(Placement("m_0", InstanceKind.KIND_CPU))
        return model.memory()

    assert asyncio.run(load()) == [MemoryUsage("CPU", 0, (files.version_dir / "model.onnx").stat().st_size)]


def test_models_can_share_the_process_s_threads(tmp_path: Path) -> None:
    # In a process of its own: the pool is there once and for good.
    files_of(tmp_path, models.mlp())
    code = f"""
import asyncio, pathlib, sys
from charonia.server.backends.api import *
from charonia.server.backends.onnxruntime.backend import OnnxRuntimeBackend
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig

async def main():
    folder = pathlib.Path({str(tmp_path / "m")!r})
    files = ModelFiles(folder, 1, folder / "1")
    settings = BackendSettings({{"enable-global-threadpool": "1", "intra_op_thread_count": "2"}})
    backend = OnnxRuntimeBackend()
    for _ in range(2):
        config = (await backend.complete(files, ModelConfig(name="m"), settings)).config
        model = await backend.load(files, config, settings)
        await model.create_instance(Placement("m_0", InstanceKind.KIND_CPU))
    print("loaded")

asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (ran.stdout, ran.stderr) == ("loaded\n", "")


def test_the_library_keeps_no_telemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)

    code = "import charonia.server.backends.onnxruntime.backend"
    subprocess.run([sys.executable, "-c", code], check=True)

    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_engines_is_made_before_tensorrt_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"trt_engine_cache_path": "~/engines/m", "device_id": "0"}

    assert backend._prepared(TENSORRT, options) == {"trt_engine_cache_path": f"{tmp_path}/engines/m", "device_id": "0"}
    assert (tmp_path / "engines" / "m").is_dir()
