import json
from pathlib import Path

import pytest
from tests.support import models
from tests.support.models import identity_pbtxt, write_model

from charonia.cli.config import LINE, notes_text, problem_text, run
from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.errors import invalid

IDENTITY = identity_pbtxt(max_batch_size=8)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models", "echo", "", config=IDENTITY)


def test_the_complete_configuration_goes_to_stdout_and_remarks_to_stderr(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(model)]) == 0

    printed = capsys.readouterr()
    completed = parse(printed.out)
    assert isinstance(completed, ModelConfig)
    assert (completed.name, completed.backend, completed.max_batch_size) == ("echo", "identity", 8)
    assert len(completed.instance_group) == 1
    assert printed.err.startswith(("Inferred:\n", "Nothing was inferred."))
    assert printed.err.splitlines()[-1].startswith("With --front-ends: in ")


def test_a_repository_is_all_its_models(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([str(model.parent)]) == 0
    assert 'name: "echo"' in capsys.readouterr().out

    (model.parent / "empty").mkdir()
    assert run([str(model.parent / "empty")]) == 1
    assert "there is no model" in capsys.readouterr().err


def test_a_problem_of_one_model_hides_no_other_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("flawed", "wrong"):
        (model.parent / name / "1").mkdir(parents=True)
        (model.parent / name / "config.pbtxt").write_text(f'name: "not {name}"')

    assert run([str(model.parent)]) == 1

    printed = capsys.readouterr()
    assert printed.out.count("\nbackend: ") == 1
    assert [f"{model.parent / name}: unexpected directory name" in printed.err for name in ("flawed", "wrong")] == [
        True,
        True,
    ]


def test_a_file_has_the_configuration_that_clients_of_its_server_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.onnx").write_bytes(models.mlp())

    assert run([str(tmp_path / "net.onnx"), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["parameters"] == {}


def test_json_is_that_of_the_protocol(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([str(model), "--json"]) == 0

    printed = json.loads(capsys.readouterr().out)
    assert (printed["name"], printed["max_batch_size"]) == ("echo", 8)


def test_a_variant_of_the_configuration_can_be_asked_for(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "configs").mkdir()
    (model / "configs" / "small.pbtxt").write_text(identity_pbtxt(max_batch_size=2))

    assert run([str(model), "--model-config-name=small"]) == 0

    assert parse(capsys.readouterr().out).max_batch_size == 2


def test_all_problems_are_listed_and_nothing_goes_to_stdout(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "config.pbtxt").write_text('backend: "identity" max_batch_size: -1 input { data_type: TYPE_FP32 dims: 1 }')

    assert run([str(model)]) == 1

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"charonia config: {model}: ")
    assert "max_batch_size" in printed.err
    assert "input" in printed.err


def test_a_folder_that_is_not_there_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([str(tmp_path / "missing")]) == 1

    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["m", "--jsn"], ["m", "--backend-config=x"], ["a", "b"]])
def test_wrong_arguments_are_misuse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2

    assert "`charonia config --help` lists the options." in capsys.readouterr().err


def test_settings_of_backends_are_read_as_by_the_server() -> None:
    given = LINE.parse(["m", "--backend-config=onnxruntime,a=b", "--backend-config=c=d"])

    assert given.backends == {"onnxruntime": {"a": "b"}, "": {"c": "d"}}


def test_remarks_and_problems_have_a_line_each() -> None:
    assert notes_text(()) == "Nothing was inferred."
    assert notes_text(("backend 'python', from model.py", "dims")) == (
        "Inferred:\n  backend 'python', from model.py\n  dims"
    )
    assert problem_text("a/m", invalid("one\ntwo", hint="three")) == "charonia config: a/m: one\n  two\n  hint: three"
    assert problem_text("a/m", invalid("no folder 'a/m'")) == "charonia config: no folder 'a/m'"


def test_a_configuration_in_another_file_is_not_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "m.identity"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.identity").touch()
    (folder / "config.json").write_text("{}")

    run([str(folder)])

    assert "model 'm.identity': config.json is not its configuration, config.pbtxt would be" in caplog.text
