from pathlib import Path
from typing import Any

import pytest
from tests.support.tune_runs import synthetic_tune_run

from charonia.cli.main import main
from charonia.cli.tune_run import JSON_FILE, RESULTS, applicable, keep_earlier
from charonia.tools.tune.options import EXPORT, OutputSettings
from charonia.tools.tune.result import TuneRun, to_json


def test_results_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    output = OutputSettings(export=tmp_path)
    for number in (1, 2):
        (tmp_path / RESULTS).mkdir(exist_ok=True)
        (tmp_path / RESULTS / JSON_FILE).write_text(f"run {number}")
        assert keep_earlier(output) == tmp_path / f"{RESULTS}-{number}"

    assert [(tmp_path / f"{RESULTS}-{number}" / JSON_FILE).read_text() for number in (1, 2)] == ["run 1", "run 2"]
    assert not list((tmp_path / RESULTS).iterdir())


def test_a_start_that_failed_has_left_nothing_to_keep(tmp_path: Path) -> None:
    (tmp_path / RESULTS).mkdir()

    assert keep_earlier(OutputSettings(export=tmp_path)) is None


def finished(folder: Path, **options: Any) -> TuneRun:
    """Write the result of a search, with the repository that it was about, and return it."""
    found = synthetic_tune_run(**options)
    (folder / EXPORT / RESULTS).mkdir(parents=True)
    (folder / EXPORT / RESULTS / JSON_FILE).write_text(to_json(found))
    (folder / "models" / "mlp").mkdir(parents=True)
    return found


def test_what_was_found_is_applied_and_the_configuration_of_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    best = applicable(finished(tmp_path).groups[0])
    config = tmp_path / "models" / "mlp" / "config.pbtxt"
    config.write_text("max_batch_size: 8")
    monkeypatch.chdir(tmp_path)

    assert main(["tune", "apply"]) == 0
    assert main(["tune", "apply"]) == 0

    assert best is not None
    assert config.read_text() == best.configs[0].text
    assert config.with_name("config.pbtxt.before_tune").read_text() == "max_batch_size: 8"
    assert f"{Path('models/mlp/config.pbtxt')}: {best.short_name}\n" in capsys.readouterr().out


def test_a_variant_can_be_named(tmp_path: Path) -> None:
    other = finished(tmp_path).groups[0].variants[1]

    arguments = ["-e", str(tmp_path / EXPORT), "-m", str(tmp_path / "models"), "--quiet"]
    assert main(["tune", "apply", other.short_name, *arguments]) == 0

    assert (tmp_path / "models" / "mlp" / "config.pbtxt").read_text() == other.configs[0].text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "config_99"], "unknown variant 'config_99'"),
        (["-m", "elsewhere"], "there is no folder '"),
        (["-e", "empty"], "does not exist (hint: charonia tune profile writes it"),
    ],
)
def test_what_cannot_be_applied_says_why_and_changes_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finished(tmp_path)
    monkeypatch.chdir(tmp_path)

    assert main(["tune", "apply", *arguments]) == 99

    assert message in capsys.readouterr().err
    assert not list((tmp_path / "models" / "mlp").iterdir())


def test_a_recommendation_to_change_nothing_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path, latency_max_ms=0.001)  # which no configuration keeps
    monkeypatch.chdir(tmp_path)

    assert main(["tune", "apply"]) == 0

    assert capsys.readouterr().out.startswith("Nothing to apply")
    assert not list((tmp_path / "models" / "mlp").iterdir())
