import json
import shutil
import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from charonia.cli import doctor as command
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig
from charonia.install_hint import extra_hint
from charonia.server.doctor import machine, repository
from charonia.server.doctor.machine import (
    Check,
    Section,
    bytes_text,
    gpus,
    is_optimised,
    onnxruntime_finding,
    packages,
    port_finding,
    problem_count,
    python_finding,
    to_json,
    to_text,
    torch_findings,
)
from charonia.server.doctor.repository import copies_of, problem_of, totals
from charonia.server.machine.gpus import NvmlDevice


class FakeNvml:
    def driver(self) -> tuple[str, str]:
        return "580.1", "13.2"

    def devices(self) -> list[NvmlDevice]:
        return [NvmlDevice(0, "GPU-1", "Fake 9000", 80 * 2**30, "9.0")]


def torch_of(cuda: str | None, count: int) -> SimpleNamespace:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=None),
        cuda=SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count),
        get_num_threads=lambda: 2,
    )


def group(kind: InstanceKind, count: int = 1, gpus: tuple[int, ...] = ()) -> InstanceGroup:
    return InstanceGroup("g", kind, count=count, gpus=gpus)


def test_a_report_marks_what_is_wrong_and_counts_it() -> None:
    sections = [
        Section("One", (Check("a", "1"), Check("longer", "2", "is wrong", "mend it"))),
        Section("Two", (Check("b", "3"),)),
    ]

    assert to_text(sections).splitlines() == [
        "One",
        "  a       1",
        "! longer  2",
        "          is wrong",
        "          hint: mend it",
        "",
        "Two",
        "  b  3",
    ]
    assert problem_count(sections) == 1
    assert to_json(sections)["One"] == [
        {"name": "a", "value": "1"},
        {"name": "longer", "value": "2", "problem": "is wrong", "hint": "mend it"},
    ]


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 * 2**20, "3 MiB"), (2**41, "2048 GiB")])
def test_bytes_are_shown_in_units_for_people(size: int, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("prefix", "arguments", "expected"),
    [
        ("/opt/pyenv/versions/3.11.7", "'--prefix=/opt/pyenv/versions/3.11.7' '--enable-shared'", False),
        ("/opt/pyenv/versions/3.12.1", "'--enable-optimizations' '--with-lto'", True),
        ("/usr/local", "'--build=x86_64-linux-gnu' '--enable-optimizations'", True),
        ("/usr", "'--enable-shared' '--prefix=/usr'", True),
        ("C:\\Python311", "", True),
    ],
)
def test_an_interpreter_says_how_it_was_built(prefix: str, arguments: str, expected: bool) -> None:
    assert is_optimised(prefix, arguments) is expected


def test_an_interpreter_that_is_slow_is_mentioned_and_is_no_problem() -> None:
    assert python_finding(True).hint == ""
    slow = python_finding(False)
    assert "built without optimisation" in slow.value
    assert "--enable-optimizations" in slow.hint
    assert not slow.problem


def test_gpus_are_described_by_the_driver() -> None:
    driver, gpu, visible = gpus(FakeNvml(), 1, {"CUDA_VISIBLE_DEVICES": "0"})  # type: ignore[arg-type]

    assert driver.value == "580.1, runs CUDA up to 13.2"
    assert gpu == Check("GPU 0", "Fake 9000, 80 GiB, compute capability 9.0, GPU-1")
    assert visible.value == "0"


def test_gpus_that_cannot_be_read_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    [none] = gpus(None, 0, {})
    [silent] = gpus(None, 2, {})
    monkeypatch.setattr(machine, "_installed", lambda name: "")
    [missing] = gpus(None, 2, {})

    assert not none.problem
    assert silent.problem == "the driver does not answer"
    assert missing.hint == extra_hint("gpu")


@pytest.mark.parametrize(
    ("cuda", "usable", "gpu_count", "value", "problem"),
    [
        (None, 0, 0, "2.13.0, CPU only, GPUs 0", ""),
        ("13.0", 2, 2, "2.13.0, CUDA 13.0, GPUs 2", ""),
        (None, 0, 1, "2.13.0, CPU only, GPUs 0", "it cannot use the GPUs of this machine"),
        ("13.0", 0, 1, "2.13.0, CUDA 13.0, GPUs 0", "it cannot use the GPUs of this machine"),
    ],
)
def test_pytorch_is_shown_with_its_build_and_whether_it_can_use_the_gpus(
    cuda: str | None, usable: int, gpu_count: int, value: str, problem: str
) -> None:
    first, _ = torch_findings(torch_of(cuda, usable), gpu_count)

    assert (first.value, first.problem) == (value, problem)


def test_a_framework_that_is_not_there_is_said() -> None:
    assert "not installed" in next(iter(torch_findings("not installed", 0))).value
    assert onnxruntime_finding("no libstdc++").problem == "no libstdc++"


def test_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert port_finding(taken.getsockname()[1]).value == "in use"


def test_weights_count_once_for_each_instance_unless_they_are_shared() -> None:
    torch = ModelConfig(backend="pytorch", instance_group=(group(InstanceKind.KIND_CPU, 3),))
    shared = ModelConfig(
        backend="pytorch",
        parameters={"ENABLE_WEIGHT_SHARING": "true"},
        instance_group=(group(InstanceKind.KIND_GPU, 3, (0, 1)),),
    )
    onnx = ModelConfig(backend="onnxruntime", instance_group=(group(InstanceKind.KIND_CPU, 3),))
    forest = ModelConfig(backend="fil", instance_group=(group(InstanceKind.KIND_CPU, 3),))

    assert copies_of(torch, on_gpu=False) == 3
    assert copies_of(shared, on_gpu=True) == 2
    assert copies_of(shared, on_gpu=False) == 0
    assert copies_of(onnx, on_gpu=False) == 1
    assert copies_of(forest, on_gpu=False) == 1


@pytest.mark.parametrize("distribution", ["tensorflow", "tensorflow-cpu"])
def test_either_build_of_tensorflow_is_found(monkeypatch: pytest.MonkeyPatch, distribution: str) -> None:
    def installed(name: str) -> str:
        if name != distribution:
            raise PackageNotFoundError(name)
        return "2.21.0"

    monkeypatch.setattr("charonia.server.doctor.machine.version", installed)

    found = {check.name: check.value for check in packages()}

    assert found["tensorflow"] == "2.21.0"
    assert found["openvino"].startswith("none")


def test_more_memory_than_there_is_is_a_problem() -> None:
    config = ModelConfig(
        backend="pytorch", instance_group=(group(InstanceKind.KIND_CPU, 2), group(InstanceKind.KIND_GPU))
    )

    weights, on_gpus = totals([(config, 2**50)])

    assert weights.problem == "there is not enough memory for all models at a time"
    assert on_gpus.name == "memory of GPUs for weights"


def test_what_a_model_lacks_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "usable_cores", lambda: 2)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiled = ModelConfig(backend="pytorch", parameters={repository.COMPILE: "{}"})
    crowded = ModelConfig(backend="pytorch", instance_group=(group(InstanceKind.KIND_CPU, 5),))

    assert problem_of(compiled)[1] == "install g++"
    assert "5 instances compute on 2 cores" in problem_of(crowded)[0]
    assert problem_of(ModelConfig(backend="onnxruntime")) == ("", "")


def test_an_engine_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.server.doctor.repository.find_spec", lambda name: None)
    problem, hint = problem_of(ModelConfig(backend="llama_cpp"))
    assert "needs the package xllamacpp" in problem
    assert "[llama]" in hint
    assert problem_of(ModelConfig(backend="llama_cpp", parameters={"EXECUTION_ENV_PATH": "env"})) == ("", "")
    problem, hint = problem_of(ModelConfig(backend="tensorrtllm"))
    assert problem == "the model needs the package tensorrt_llm, which is not installed"
    assert "nvcr.io/nvidia/tensorrt-llm/release" in hint


def write(repository: Path, name: str, config: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config, encoding="utf-8")


def test_the_command_shows_what_each_model_of_a_repository_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = (
        "input { name: 'INPUT0' data_type: TYPE_FP32 dims: 1 } output { name: 'OUTPUT0' data_type: TYPE_FP32 dims: 1 }"
    )
    write(tmp_path, "fine", f"backend: 'identity' {tensors}")
    write(tmp_path, "lost", f"backend: 'nothing' {tensors}")
    write(tmp_path, "plan", f"platform: 'tensorrt_plan' {tensors}")
    write(tmp_path, "graph", f"platform: 'tensorflow_graphdef' {tensors}")
    write(tmp_path, "file", tensors)
    (tmp_path / "file" / "1" / "model.graphdef").write_bytes(b"")
    write(tmp_path, "gpu", f"backend: 'identity' {tensors} instance_group {{ kind: KIND_GPU gpus: 97 }}")

    status = command.run([str(tmp_path), "--json"])

    models = {found["name"]: found for found in json.loads(capsys.readouterr().out)["Models"]}
    assert status == 1
    assert models["fine"]["value"].startswith("identity, 1 x CPU")
    assert "problem" not in models["fine"]
    assert "unable to find backend 'nothing'" in models["lost"]["problem"]
    assert "ONNX" not in models["lost"]["hint"]
    assert "ONNX" in models["plan"]["hint"]
    assert "gpu" in models["gpu"]["problem"].lower()
    for name in ("graph", "file"):
        assert models[name]["problem"] == "a frozen graph (tensorflow_graphdef) is not served, a SavedModel is"
        assert 'open("model.graphdef", "rb")' in models[name]["hint"]


def test_a_plan_needs_a_gpu_and_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ModelConfig(backend="tensorrt")
    monkeypatch.setattr(repository, "find_spec", lambda name: None)

    monkeypatch.setattr(repository, "visible_gpus", lambda: 0)
    assert "runs on an NVIDIA GPU only" in problem_of(plan)[0]
    monkeypatch.setattr(repository, "visible_gpus", lambda: 1)
    assert "needs the package tensorrt" in problem_of(plan)[0]
    monkeypatch.setattr(repository, "find_spec", lambda name: name)
    assert problem_of(plan) == ("", "")


def test_the_command_says_why_a_repository_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["--model-repository", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err


def test_the_command_shows_the_machine_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    command.run([])

    shown = capsys.readouterr().out
    assert shown.startswith("Machine\n")
    assert "ONNX Runtime" in shown
