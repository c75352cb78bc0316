"""What the files of a repository tell of where its models will run."""

from pathlib import Path

import pytest
from tests.support.models import identity, identity_pbtxt, write_model

from charonia.server.lifecycle.front_end_placement import BYTES_MAX
from charonia.server.lifecycle.placement_forecast import SMALL_BYTES, largest_bytes, reason_to_stay

CHOSEN = 'parameters {{ key: "front_end" value {{ string_value: "{}" }} }}'


def reason(repository: Path, *, config_name: str = "", gpu_count: int = 0) -> str:
    return reason_to_stay([str(repository)], config_name=config_name, gpu_count=gpu_count)


def write_onnx(repository: Path, *, size: int = 0, choice: str = "auto") -> None:
    config = identity_pbtxt("onnxruntime", more=CHOSEN.format(choice))
    write_model(repository, "m", identity(), config=config)
    with (repository / "m" / "1" / "weights").open("wb") as file:
        file.truncate(size)


def test_small_models_of_the_right_kind_may_run_in_front_ends_with_and_without_a_configuration(tmp_path: Path) -> None:
    write_onnx(tmp_path)
    write_model(tmp_path, "silent", identity())
    write_model(tmp_path, "identity", "", config=identity_pbtxt())
    write_model(tmp_path, "all", "", config='platform: "ensemble"')

    assert reason(tmp_path) == ""


def test_a_model_that_must_stay_in_the_engine_is_named_with_the_reason(tmp_path: Path) -> None:
    write_onnx(tmp_path)
    write_model(tmp_path, "script", "", config=identity_pbtxt("python"))

    assert reason(tmp_path) == "model 'script' will run in the engine only: models of backend 'python' exist once"


@pytest.mark.parametrize(
    ("size", "choice", "stays"),
    [
        (SMALL_BYTES - 2**16, "auto", False),
        (SMALL_BYTES, "auto", True),
        (SMALL_BYTES, "yes", False),
        (BYTES_MAX, "yes", True),
        (0, "no", True),
        (0, "perhaps", True),
    ],
)
def test_large_files_and_the_parameter_count(tmp_path: Path, size: int, choice: str, *, stays: bool) -> None:
    write_onnx(tmp_path, size=size, choice=choice)

    assert bool(reason(tmp_path)) is stays


def test_the_variant_of_the_configuration_and_gpus_count(tmp_path: Path) -> None:
    write_onnx(tmp_path)
    (tmp_path / "m" / "configs").mkdir()
    (tmp_path / "m" / "configs" / "held.pbtxt").write_text(identity_pbtxt("onnxruntime", more=CHOSEN.format("no")))

    assert "parameter front_end is 'no'" in reason(tmp_path, config_name="held")
    assert reason(tmp_path, config_name="other") == ""
    assert "does not run on the CPU" in reason(tmp_path, gpu_count=1)


def test_the_largest_version_is_found_among_all_models(tmp_path: Path) -> None:
    for name, size in (("m", 10), ("other", 3000)):
        write_model(tmp_path, name, "", config=identity_pbtxt())
        (tmp_path / name / "2").mkdir()
        (tmp_path / name / "2" / "weights").write_bytes(bytes(size))

    assert largest_bytes([str(tmp_path), "s3://bucket/models"]) == 3000
    assert largest_bytes([str(tmp_path / "missing")]) == 0


def test_what_cannot_be_known_stays_in_the_engine(tmp_path: Path) -> None:
    assert reason(tmp_path) == "there are no models yet"
    assert "no such file or directory" in reason(tmp_path / "missing")
    assert "not known before they are fetched" in reason_to_stay(["s3://bucket/models"])
    (tmp_path / "m").mkdir()
    assert "at least one version" in reason(tmp_path)
    write_model(tmp_path, "m", identity(), config="no configuration")
    assert "model 'm' will run in the engine only: " in reason(tmp_path)
