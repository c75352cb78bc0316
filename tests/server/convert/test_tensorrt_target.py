"""`charonia convert --to tensorrt`: plans by the stand-in for TensorRT, and what machines lack."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.support.pretended_tensorrt import StreamingCuda, pretended

from charonia.cli.convert import run
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import BackendSettings, ModelFiles, Outputs, Placement
from charonia.server.backends.tensorrt import build
from charonia.server.backends.tensorrt.backend import TensorRtBackend
from charonia.server.backends.tensorrt.build import check_machine
from charonia.server.channel.cuda_driver import CudaError, Driver


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cuda(tmp_path: Path) -> Iterator[StreamingCuda]:
    (tmp_path / "gpu").mkdir()
    with pretended(tmp_path / "gpu") as found:
        yield found


def write_onnx(path: str = "net.onnx", dims: tuple[str | int, ...] = ("batch", 4), operator: str = "Mul") -> None:
    """Write 2 x + 1."""
    numbers = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in (("two", 2), ("one", 1))]
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "two"], ["d"]), helper.make_node("Add", ["d", "one"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)],
        numbers,
    )
    onnx.save(helper.make_model(graph), path)


def served(folder: Path, x: Array) -> tuple[ModelConfig, Array]:
    """Return the completed configuration of a repository's model, and its answer."""

    async def main() -> tuple[ModelConfig, Array]:
        files, backend = ModelFiles(folder, 1, folder / "1"), TensorRtBackend()
        config = (await backend.complete(files, ModelConfig(name=folder.name), BackendSettings())).config
        model = await backend.load(files, config, BackendSettings())
        instance = await model.create_instance(Placement("net_0", InstanceKind.KIND_GPU))
        (result,) = instance.execute([InferRequest("net", {"x": Tensor("x", DataType.FP32, x)})]).results
        assert isinstance(result, Outputs)
        return config, result.tensors[0].array

    return asyncio.run(main())


def test_an_onnx_model_becomes_a_plan_that_is_served(
    cuda: StreamingCuda, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_onnx()

    assert run(["net.onnx", "--to", "tensorrt", "--repository", "models"]) == 0

    assert "wrote models/net/1/model.plan" in capsys.readouterr().out
    config, y = served(tmp_path / "models" / "net", np.ones((2, 4), np.float32))
    assert (config.max_batch_size, config.input[0].dims, y.tolist()) == (32, (4,), [[3.0] * 4] * 2)


def test_shapes_and_precision_are_those_that_are_asked_for(cuda: StreamingCuda, tmp_path: Path) -> None:
    write_onnx(dims=("batch", "width"))
    (tmp_path / "m" / "1").mkdir(parents=True)

    shapes = ["--shapes", "x:1x2,2x3,4x8", "--precision", "fp16"]
    assert run(["net.onnx", "--to", "tensorrt", "-o", "m/1/model.plan", *shapes]) == 0

    assert b'"precision": "HALF"' in (tmp_path / "m" / "1" / "model.plan").read_bytes()
    config, _ = served(tmp_path / "m", np.ones((4, 8), np.float32))
    assert config.max_batch_size == 4


@pytest.mark.parametrize(
    ("arguments", "operator", "expected"),
    [
        ([], "Mul", "--shapes x:1x64,8x64,32x64"),
        (["--shapes", "y:1x2,2x3,4x8"], "Mul", "the model has no input y"),
        (["--shapes", "x:1x2,2x3,4x8"], "Sub", "cannot read net.onnx: In node 0: no importer for Sub"),
        (["--shapes", "x:1x2,2x3"], "Mul", "expected NAME:MIN,OPT,MAX"),
        (["--precision", "int4"], "Mul", "expected one of fp32, fp16, got 'int4'"),
    ],
)
def test_what_cannot_be_built_says_why(
    cuda: StreamingCuda,
    arguments: list[str],
    operator: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_onnx(dims=("batch", "width"), operator=operator)

    assert run(["net.onnx", "--to", "tensorrt", *arguments]) != 0
    assert expected in capsys.readouterr().err
    assert not Path("net.plan").exists()


def test_shapes_that_the_model_does_not_have_are_refused_by_the_builder(
    cuda: StreamingCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    write_onnx()

    assert run(["net.onnx", "--to", "tensorrt", "--shapes", "x:1x5,2x5,4x5"]) == 1
    assert "cannot build a plan of net.onnx: IBuilder::buildSerializedNetwork" in capsys.readouterr().err


def test_a_tensorrt_without_precisions_says_what_to_do(
    cuda: StreamingCuda, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["tensorrt"], "BuilderFlag", SimpleNamespace(TF32=1))
    write_onnx()

    assert run(["net.onnx", "--to", "tensorrt", "--precision", "fp16"]) == 1
    assert "takes the precision from the model" in capsys.readouterr().err


def test_a_machine_without_anything_is_told_all_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def driver() -> Driver:
        raise CudaError("there is no driver")

    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setattr(build, "driver", driver)
    monkeypatch.setattr(build, "_has_hardware", lambda folder: False)
    write_onnx()

    assert run(["net.onnx", "--to", "tensorrt"]) == 1

    shown = capsys.readouterr().err
    for expected in ("docker run --gpus all", "nvidia-driver", "the package 'tensorrt'", "[tensorrt]"):
        assert expected in shown


def test_a_gpu_without_its_driver_lacks_the_driver_only(cuda: StreamingCuda, tmp_path: Path) -> None:
    device = tmp_path / "devices" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    cuda._gpus = []

    with pytest.raises(Exception, match="This machine lacks:\n- a driver that works") as found:
        check_machine(device.parent)
    assert "an NVIDIA GPU" not in str(found.value)
    assert "TensorRT (" not in str(found.value)
