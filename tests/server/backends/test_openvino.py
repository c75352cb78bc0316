"""The OpenVINO backend."""

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import openvino
import pytest
from tests.support import models, paddle_models, tflite_models
from tests.support.backends import ask, assert_close, complete_wholly, request, request_of, version_of
from tests.support.backends import load as load_by
from tests.support.onnx_writer import GraphWriter

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOperations, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Array
from charonia.server.backends.api import ModelFiles, Placement
from charonia.server.backends.openvino import backend
from charonia.server.backends.openvino.backend import Network, NetworkTensor, OpenVinoBackend, follows_batch
from charonia.testing.backend_suite import BackendCase, BackendSuite

FP32, INT64, BF16 = DataType.FP32, DataType.INT64, DataType.BF16
op = openvino.opset13
WEIGHTS = np.random.default_rng(0).normal(0, 0.25, (16, 4)).astype(np.float32)


def layer(batch: int = -1, kind: Any = np.float32) -> Any:
    """x [batch, 16] -> scores [batch, 4]."""
    x = op.parameter([batch, 16], kind, name="x")
    product = op.matmul(x, op.constant(WEIGHTS.astype(kind)), False, False)
    return named(op.relu(product), [x], "scores")


def named(result: Any, parameters: list[Any], name: str) -> Any:
    result.output(0).tensor.set_names({name})
    return openvino.Model([result], parameters, "m")


def expected(x: Array) -> Array:
    result: Array = np.maximum(x.astype(np.float32) @ WEIGHTS, 0)
    return result


def files_of(tmp_path: Path, model: Any) -> ModelFiles:
    files = version_of(tmp_path / "m")
    openvino.save_model(model, files.version_dir / "model.xml", compress_to_fp16=False)
    return files


complete, load = partial(complete_wholly, OpenVinoBackend), partial(load_by, OpenVinoBackend)


def rows(seed: int, size: int) -> InferRequest:
    return request_of(x=np.random.default_rng(seed).random((size, 16), np.float32))


def in_rows_of(seed: int, size: int, length: int = 5) -> InferRequest:
    x = np.random.default_rng(seed).random((size, 5), np.float32)
    return request_of(x=x, length=np.full((size, 1), length))


class TestLayer(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        files = files_of(tmp_path, layer())
        return BackendCase(
            OpenVinoBackend, files, complete(files, ModelConfig(name="m", max_batch_size=8)).config, rows
        )


class TestPadded(BackendSuite):
    """Every batch is filled up to 8 rows."""

    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        files = files_of(tmp_path, layer(batch=1))
        config = ModelConfig(name="m", max_batch_size=8, parameters={"ENABLE_BATCH_PADDING": "YES"})
        return BackendCase(OpenVinoBackend, files, complete(files, config).config, rows)


class TestVariable(BackendSuite):
    """The output's shape depends on the values of an input, some of which do not fit; with one thread, and with two."""

    @pytest.fixture(params=[1, 2])
    def backend_case(self, tmp_path: Path, request: pytest.FixtureRequest) -> BackendCase:
        x = op.parameter([-1, -1], np.float32, name="x")
        length = op.parameter([-1, 1], np.int64, name="length")
        longest = op.reduce_max(length, op.constant(np.array([0, 1])), keep_dims=False)
        size = op.gather(op.shape_of(x), op.constant(np.array([0])), op.constant(0))
        shape = op.concat([size, op.unsqueeze(longest, op.constant(0))], 0)
        files = files_of(tmp_path, named(op.reshape(x, shape, False), [x, length], "y"))
        groups = (InstanceGroup("m_0", InstanceKind.KIND_CPU, count=request.param),)
        config = complete(files, ModelConfig(name="m", max_batch_size=8, instance_group=groups)).config
        return BackendCase(OpenVinoBackend, files, config, in_rows_of, bad_request=lambda: in_rows_of(0, 1, 7))


def test_an_ir_file_is_completed(tmp_path: Path) -> None:
    config = complete(files_of(tmp_path, layer())).config

    assert config.max_batch_size == 4
    assert config.input == (ModelInput("x", FP32, dims=(16,)),)
    assert config.output == (ModelOutput("scores", FP32, (4,)),)


def in_onnx_runtime(x: Array) -> Array:
    [answer] = onnxruntime.InferenceSession(models.mlp()).run(None, {"input": x})
    return np.asarray(answer)


@pytest.mark.parametrize(
    ("file_name", "content", "width", "expected"),
    [
        ("model.onnx", models.mlp(), 128, in_onnx_runtime),
        ("model.tflite", tflite_models.mlp(), 16, tflite_models.mlp_expected),
        ("model.pdmodel", paddle_models.relu(4), 4, lambda x: np.maximum(x, 0)),
    ],
)
def test_a_file_of_another_framework_is_served(
    tmp_path: Path, file_name: str, content: bytes, width: int, expected: Callable[[Array], Array]
) -> None:
    files = version_of(tmp_path / "m", **{file_name: content})
    config = complete(files, ModelConfig(name="m", default_model_filename=file_name)).config
    x = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)

    [own] = ask(load(files, config), **{config.input[0].name: x}).values()

    assert_close(own, expected(x))


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        (8, {"ENABLE_BATCH_PADDING": "NO"}),
        (8, {"ENABLE_BATCH_PADDING": "YES"}),
        (1, {"SKIP_OV_DYNAMIC_BATCHSIZE": "YES"}),
    ],
)
def test_a_model_made_for_one_row_batches_where_the_configuration_says_so(
    tmp_path: Path, size: int, parameters: dict[str, str]
) -> None:
    files = files_of(tmp_path, layer(batch=1))
    x = np.random.default_rng(0).random((min(size, 3), 16), np.float32)

    assert complete(files).config.max_batch_size == 0
    config = complete(files, ModelConfig(name="m", max_batch_size=size, parameters=parameters)).config

    assert_close(ask(load(files, config), x=x)["scores"], expected(x))


def test_a_fixed_batch_that_stays_needs_padding(tmp_path: Path) -> None:
    files = files_of(tmp_path, layer(batch=8))
    config = ModelConfig(name="m", max_batch_size=4, parameters={"SKIP_OV_DYNAMIC_BATCHSIZE": "YES"})
    padded = replace(config, parameters={**config.parameters, "ENABLE_BATCH_PADDING": "yes"})
    x = np.random.default_rng(0).random((2, 16), np.float32)

    with pytest.raises(ServingError, match="takes batches of 8 only") as caught:
        complete(files, config)
    assert "ENABLE_BATCH_PADDING" in caught.value.hint
    with pytest.raises(ServingError, match="max_batch_size is 9, and the model takes batches of 8"):
        complete(files, replace(padded, max_batch_size=9))
    outputs = ask(load(files, complete(files, padded).config), x=x)
    assert_close(outputs["scores"], expected(x))


def test_batches_are_filled_up_where_the_outputs_keep_a_fixed_size(tmp_path: Path) -> None:
    x = op.parameter([8, 4], np.float32, name="x")
    files = files_of(tmp_path, named(op.reshape(op.add(x, x), op.constant(np.array([8, 4])), False), [x], "y"))
    rows = np.random.default_rng(0).random((2, 4), np.float32)

    outputs = ask(load(files, complete(files, ModelConfig(name="m", max_batch_size=8)).config), x=rows)

    assert_close(outputs["y"], 2 * rows)


def test_inputs_get_the_configured_dims_where_a_parameter_says_so(tmp_path: Path) -> None:
    x = op.parameter([1, 3, 8, 8], np.float32, name="x")
    files = files_of(tmp_path, named(op.relu(x), [x], "y"))
    config = ModelConfig(
        name="m",
        backend="openvino",
        max_batch_size=4,
        input=(ModelInput("x", FP32, dims=(3, -1, -1)),),
        output=(ModelOutput("y", FP32, (3, -1, -1)),),
    )
    picture = np.full((2, 3, 5, 7), -1, np.float32)

    with pytest.raises(ServingError, match="the model expects shape"):
        load(files, config)
    outputs = ask(load(files, replace(config, parameters={"RESHAPE_IO_LAYERS": "YES"})), x=picture)

    assert outputs["y"].tolist() == np.zeros((2, 3, 5, 7)).tolist()


@pytest.mark.parametrize(
    ("shape", "given", "answer"),
    [([], np.array([3], np.float32), [5]), ([-1, 2], np.array([[np.nan, 1]], np.float32), [[np.nan, 3]])],
)
def test_scalars_and_what_is_no_number_are_served(
    tmp_path: Path, shape: list[int], given: Array, answer: list[Any]
) -> None:
    x = op.parameter(shape, np.float32, name="x")
    files = files_of(tmp_path, named(op.add(x, op.constant(np.float32(2))), [x], "y"))

    outputs = ask(load(files, complete(files).config), x=given)

    np.testing.assert_array_equal(outputs["y"], answer)


def test_bf16_is_passed_as_bit_patterns(tmp_path: Path) -> None:
    x = op.parameter([-1, 2], openvino.Type.bf16, name="x")
    files = files_of(tmp_path, named(op.add(x, x), [x], "y"))
    instance = load(files, complete(files).config)
    ones = np.full((1, 2), 0x3F80, np.uint16)

    assert ask(instance, request({"x": (BF16, ones)}))["y"].tolist() == [[0x4000, 0x4000]]


@pytest.mark.parametrize("threads", [1, 2])
def test_inputs_that_do_not_fit_together_are_an_error_of_that_request(tmp_path: Path, threads: int) -> None:
    a, b = (op.parameter([-1, -1], np.float32, name=name) for name in "ab")
    files = files_of(tmp_path, named(op.relu(op.add(a, b)), [a, b], "y"))
    parameters = {"INFERENCE_NUM_THREADS": str(threads)}
    instance = load(files, replace(complete(files).config, parameters=parameters))

    for size in (2, 3, 4):
        ones = np.ones((1, size), np.float32)
        with pytest.raises(ServingError, match="OpenVINO failed") as caught:
            ask(instance, a=ones, b=np.ones((1, size + 1), np.float32))
        assert f"the inputs were a [1, {size}], b [1, {size + 1}]" in caught.value.hint
        assert ask(instance, a=ones, b=ones)["y"].tolist() == [[2] * size]


FIRST_RUNS = """
import threading
import numpy as np
import charonia.server.backends.openvino.backend
import openvino

x = openvino.opset13.parameter([-1, -1], np.float32, name="x")
compiled = openvino.Core().compile_model(openvino.Model([openvino.opset13.relu(x)], [x], "m"), "CPU")

def work():
    request = compiled.create_infer_request()
    for size in range(1, 100):
        request.infer({"x": np.ones((1, size), np.float32)})

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_first_runs_of_several_threads_do_not_wait_for_one_another_for_ever() -> None:
    # Without what the module does first, every other start hangs.
    subprocess.run([sys.executable, "-c", FIRST_RUNS], timeout=200, check=True)


def properties(files: ModelFiles, config: ModelConfig, threads: int = 2) -> Callable[[str], Any]:
    instance = load(files, config, place=Placement("m_0", InstanceKind.KIND_CPU, 0, threads))
    found: Callable[[str], Any] = instance._request.get_compiled_model().get_property
    return found


def test_streams_threads_and_precision_are_explicit(tmp_path: Path) -> None:
    files = files_of(tmp_path, layer())
    config = replace(complete(files).config, instance_group=(InstanceGroup("m_0", InstanceKind.KIND_CPU, count=2),))

    of = properties(files, config, threads=1)

    assert of("NUM_STREAMS") == 2
    assert of("INFERENCE_NUM_THREADS") == 2
    assert of("INFERENCE_PRECISION_HINT") == openvino.Type.f32
    assert of("DYNAMIC_QUANTIZATION_GROUP_SIZE") == 0
    assert of("ENABLE_CPU_PINNING") is False


def test_parameters_are_passed_on(tmp_path: Path) -> None:
    files = files_of(tmp_path, layer())
    parameters = {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": "1", "HINT_BF16": "YES", "ENABLE_CPU_PINNING": "YES"}

    of = properties(files, replace(complete(files).config, parameters=parameters))

    assert of("NUM_STREAMS") == 1
    assert of("INFERENCE_NUM_THREADS") == 1
    has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert of("INFERENCE_PRECISION_HINT") != openvino.Type.f32 or not has_bf16
    assert of("ENABLE_CPU_PINNING") is True


def test_a_virtual_device_computes_with_the_same_precision(tmp_path: Path) -> None:
    files = files_of(tmp_path, layer())
    x = np.random.default_rng(0).random((2, 16), np.float32)

    for device in ("AUTO", "HETERO:CPU"):
        config = replace(complete(files).config, parameters={"TARGET_DEVICE": device})
        assert_close(ask(load(files, config), x=x)["scores"], expected(x))


def test_an_unknown_parameter_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = files_of(tmp_path, layer())

    with caplog.at_level(logging.WARNING):
        load(files, replace(complete(files).config, parameters={"NUM_STREAM": "1"}))

    assert (
        "openvino backend has no parameter 'NUM_STREAM', it has no effect; did you mean 'NUM_STREAMS'?" in caplog.text
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": {"ENABLE_BATCH_PADDING": "maybe"}}, "expected true or false, got 'maybe'"),
        ({"parameters": {"INFERENCE_NUM_THREADS": "many"}}, "INFERENCE_NUM_THREADS. Expected only non negative"),
        ({"parameters": {"PERFORMANCE_HINT": "FAST"}}, "PERFORMANCE_HINT"),
        ({"parameters": {"TARGET_DEVICE": "AUTO", "NUM_STREAMS": "many"}}, "number of streams from str: many"),
        ({"parameters": {"TARGET_DEVICE": "NOWHERE"}}, 'Device with "NOWHERE" name is not registered'),
        ({"parameters": {"CPU_EXTENSION_PATH": "/nothing.so"}}, "nothing.so"),
        ({"instance_group": (InstanceGroup(kind=InstanceKind.KIND_GPU),)}, "no instances of KIND_GPU"),
        ({"model_operations": ModelOperations(("ops.so",))}, "no model_operations"),
        ({"input": (ModelInput("y", FP32, dims=(16,)),)}, "unexpected inference input 'y'"),
        ({"input": (ModelInput("x", FP32, dims=(17,)),)}, "the model expects shape"),
        ({"input": (ModelInput("x", INT64, dims=(16,)),)}, "configuration expects datatype TYPE_INT64"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    files = files_of(tmp_path, layer())
    config = replace(complete(files).config, **change)  # type: ignore[arg-type]

    with pytest.raises(ServingError, match=message) as caught:
        load(files, config)
    assert "core.cpp" not in caught.value.message


def test_a_model_with_state_is_refused(tmp_path: Path) -> None:
    x = op.parameter([1, 2], np.float32, name="x")
    kept = openvino.opset6.read_value(op.constant(np.zeros((1, 2), np.float32)), "state")
    result = op.add(x, kept)
    written = openvino.opset6.assign(result, "state")
    result.output(0).tensor.set_names({"y"})
    files = files_of(tmp_path, openvino.Model([openvino.opset13.result(result)], [written], [x], "m"))

    with pytest.raises(ServingError, match="keeps state from one inference to the next"):
        complete(files)


def test_strings_are_refused(tmp_path: Path) -> None:
    x = op.parameter([-1], openvino.Type.string, name="x")
    files = files_of(tmp_path, openvino.Model([openvino.opset13.result(x)], [x], "m"))

    with pytest.raises(ServingError, match="input 'x' is string, which cannot be sent") as caught:
        complete(files)
    assert caught.value.code is Code.UNSUPPORTED


def bad_operator() -> bytes:
    graph = GraphWriter()
    graph.input("x", FP32, ["n", 4])
    graph.node("Nope", ["x"], "y")
    graph.output("y", FP32, ["n", 4])
    return graph.model()


@pytest.mark.parametrize(
    ("file_name", "content", "message", "hint"),
    [
        ("model.xml", b"<net", "Unable to read the model", "is incomplete"),
        ("model.xml", b"not a model", "Unable to read the model", "not of this format"),
        ("model.onnx", b"not a model", "Unable to read the model", "not of this format"),
        ("model.onnx", models.mlp()[:5000], "cannot load model.onnx", ""),
        ("model.onnx", bad_operator(), "Nope", "CPU_EXTENSION_PATH"),
        ("model.onnx", b"version https://git-lfs.github.com/spec/v1\noid", "cannot load", "git lfs pull"),
        ("model.tflite", b"not a model" * 20, "Unable to read the model", "not of this format"),
        ("model.pdmodel", b"xx", "cannot load model.pdmodel", ""),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(
    tmp_path: Path, file_name: str, content: bytes, message: str, hint: str
) -> None:
    files = version_of(tmp_path / "m", **{file_name: content})

    with pytest.raises(ServingError, match=message) as caught:
        complete(files, ModelConfig(name="m", default_model_filename=file_name))

    assert caught.value.code is Code.INVALID_ARG
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "spoil", "message", "hint"),
    [
        ("model.bin", lambda weights: weights[:100], "Incorrect weights in bin file", "incomplete"),
        ("model.bin", None, "bin file cannot be found", "belongs beside the .xml file"),
        (
            "model.xml",
            lambda xml: xml.replace(b'version="11"', b'version="99"'),
            "Unable to read the model",
            "newer OpenVINO",
        ),
        (
            "model.xml",
            lambda xml: xml.replace(b'type="MatMul"', b'type="Nope"'),
            "doesn't contain the operation with type: Nope",
            "CPU_EXTENSION_PATH",
        ),
        ("model.xml", lambda _: b"", "cannot load model.xml", "the file is empty"),
    ],
)
def test_a_bad_ir_is_refused_with_the_reason(
    tmp_path: Path, name: str, spoil: Callable[[bytes], bytes] | None, message: str, hint: str
) -> None:
    files = files_of(tmp_path, layer())
    config = complete(files).config
    path = files.version_dir / name
    content = path.read_bytes()
    path.unlink()
    if spoil is not None:
        path.write_bytes(spoil(content))

    with pytest.raises(ServingError, match=message) as caught:
        load(files, config)

    assert caught.value.code is Code.INVALID_ARG
    assert hint in caught.value.hint


def test_a_size_of_batches_that_has_run_needs_no_change_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(tmp_path, layer())
    config = complete(files, ModelConfig(name="m", max_batch_size=4)).config
    running = load(files, replace(config, parameters={"INFERENCE_NUM_THREADS": "1"}))
    synchronous: list[tuple[int, ...]] = []
    run = backend._infer

    def watched(request: Any, *given: Any) -> None:
        synchronous.append(tuple(request.get_input_tensor(0).shape))
        run(request, *given)

    monkeypatch.setattr(backend, "_infer", watched)
    for size in (2, 3, 2, 3, 1):
        x = np.random.default_rng(size).random((size, 16), np.float32)
        assert_close(ask(running, x=x)["scores"], expected(x))

    assert synchronous == [(2, 16), (3, 16)]


@pytest.mark.parametrize(("model", "follows"), [("layer", True), ("values", False), ("width", False)])
def test_what_decides_the_shapes_within_a_model(model: str, follows: bool) -> None:
    x = op.parameter([-1, -1 if model == "width" else 4], np.float32, name="x")
    result = op.non_zero(x) if model == "values" else op.relu(x)
    made = named(result, [x], "y")
    shape = tuple(-1 if dim.is_dynamic else dim.get_length() for dim in made.inputs[0].partial_shape)

    assert follows_batch(Network(made, (NetworkTensor("x", 0, x.output(0).element_type, shape),), (), 0)) is follows
