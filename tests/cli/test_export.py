"""`charonia export`: what it reads, and what it writes."""

from pathlib import Path

import pytest
import yaml
from tests.support.models import identity_pbtxt, write_model

from charonia.cli.export import models_at, run

URI = "--storage-uri=s3://bucket/models"


def test_the_objects_go_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "models", "echo", "", config=identity_pbtxt())

    assert run(["kserve", str(tmp_path / "models"), URI, "--namespace=prod"]) == 0

    runtime, service = yaml.safe_load_all(capsys.readouterr().out)
    assert (runtime["kind"], service["kind"]) == ("ServingRuntime", "InferenceService")
    assert service["metadata"]["namespace"] == "prod"


def test_files_that_are_as_they_should_be_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "iris.onnx", tmp_path / "out"
    model.write_bytes(b"")
    command = ["kserve", str(model), URI, "-o", str(out)]

    assert run(command) == 0
    (out / "01-runtime.yaml").write_text("changed")
    capsys.readouterr()
    assert run(command) == 0

    assert sorted(path.name for path in out.iterdir()) == ["01-runtime.yaml", "02-service.yaml"]
    assert capsys.readouterr().out == f"{out}/01-runtime.yaml written\n{out}/02-service.yaml unchanged\n"
    assert yaml.safe_load((out / "01-runtime.yaml").read_text())["kind"] == "ServingRuntime"


def test_backends_are_those_of_configurations_or_of_files(tmp_path: Path) -> None:
    write_model(tmp_path, "a", b"x")
    write_model(tmp_path, "b", b"x", file_name="model.plan", config='name: "b"')
    write_model(tmp_path, "c", "", config='platform: "tensorflow_savedmodel"')
    write_model(tmp_path, "d", "", config='ensemble_scheduling { step { model_name: "a" model_version: -1 } }')

    exported = models_at(str(tmp_path))

    assert exported.is_repository
    assert [(each.name, each.backend, each.platform) for each in exported.models] == [
        ("a", "onnxruntime", ""),
        ("b", "tensorrt", ""),
        ("c", "", "tensorflow_savedmodel"),
        ("d", "", "ensemble"),
    ]


@pytest.mark.parametrize("place", ["file", "folder", "version", "configured"])
def test_one_model_is_one_model_wherever_its_file_is(tmp_path: Path, place: str) -> None:
    folder = write_model(tmp_path, "iris", b"x")
    loose = tmp_path / "loose"
    loose.mkdir()
    (loose / "net.onnx").write_bytes(b"x")
    if place == "configured":
        (loose / "config.pbtxt").write_text('backend: "onnxruntime"')
    path = {"file": loose / "net.onnx", "version": folder}.get(place, loose)

    exported = models_at(str(path))

    assert not exported.is_repository
    assert exported.name == {"file": "net", "version": "iris"}.get(place, "loose")
    assert [each.backend for each in exported.models] == ["onnxruntime"]


def test_a_pickle_that_the_server_would_refuse_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "iris.joblib"
    model.write_bytes(b"\x80\x04K\x01.")

    assert run(["kserve", str(model), URI]) == 1
    assert "is a pickle, which can run any code" in (said := capsys.readouterr().err)
    assert said.endswith("--argument=--trust)\n")

    assert run(["kserve", str(model), URI, "--argument=--trust"]) == 0
    assert "- --trust" in capsys.readouterr().out


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kserve", str(tmp_path / "none"), URI]) == 1
    assert run(["kserve", "--mode=cloud", str(tmp_path)]) == 2
    assert run(["kserv"]) == 2
    assert run([]) == 2
    said = capsys.readouterr().err

    assert "there is nothing at" in said
    assert "--mode: expected" in said
    assert "did you mean kserve?" in said
    assert "usage: charonia export {kserve} [OPTIONS] PATH" in said


def test_the_help_names_what_can_be_exported_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "charonia export kserve --help" in capsys.readouterr().out
