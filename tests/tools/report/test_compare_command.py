import json
from pathlib import Path

import pytest
from tests.support.runs import FakeService, synthetic_run

from charonia.cli.perf import compare as run
from charonia.tools.report.run_files import write_run
from charonia.tools.results.records import LoadLevel, LoadMode

ONE = (LoadLevel(LoadMode.CONCURRENCY, 4),)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    paths = tmp_path / "before.json", tmp_path / "after.json"
    write_run(paths[0], synthetic_run(ONE, seed=1))
    write_run(paths[1], synthetic_run(ONE, FakeService(600_000), seed=2))
    return str(paths[0]), str(paths[1])


def test_the_status_is_one_when_something_got_worse_and_zero_otherwise(files: tuple[str, str]) -> None:
    before, after = files

    assert [run([before, after]), run([after, before]), run([before, before])] == [1, 0, 0]


def test_json_has_every_figure_with_its_interval(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run([*files, "--json"])

    found = json.loads(capsys.readouterr().out)

    assert (found["format"], found["version"], found["verdict"]) == ("charonia-perf-comparison", 1, "worse")
    assert (found["before"], found["after"]) == files
    throughput = found["levels"][0]["changes"][0]
    assert throughput.keys() == {"figure", "before", "after", "difference", "low", "high", "verdict"}
    assert throughput["low"] < throughput["difference"] < throughput["high"] < 0


def test_the_page_has_the_verdict_every_change_and_both_runs(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "changes.html"

    assert run([*files, "--html", str(page)]) == 1

    text = page.read_text(encoding="utf-8")
    printed = [line.split()[:4] for line in capsys.readouterr().out.splitlines() if "WORSE" in line]
    assert '<span class="badge bad">worse</span> Throughput at the only level' in text
    assert text.count("<span class='badge bad'>worse</span>") == len(printed)
    assert all(f"{when}: {name}</h1>" in text for when, name in zip(("before", "after"), files, strict=True))
    assert run([*files, "--html", str(tmp_path)]) == 2


def test_a_threshold_above_the_change_makes_it_none(files: tuple[str, str]) -> None:
    assert run([*files, "--threshold", "50"]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "expected JSON"),
        ("[1, 2]", "expected the JSON of a run"),
        ('{"format": "charonia-perf", "version": 99}', "expected version 1 of the format, got 99"),
        ('{"format": "charonia-perf", "version": 1}', "not the JSON of a run"),
        ("\x00\xff", "expected JSON"),
    ],
)
def test_a_file_that_is_no_run_is_refused_in_one_line(
    content: str | None, message: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    if content is not None:
        other.write_text(content, encoding="latin-1")

    status = run([files[0], str(other)])

    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith(f"charonia perf compare: {other}: {message}")
    assert error.count("\n") == 1


def test_a_folder_is_no_file(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([files[0], str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_runs_of_different_models_are_refused_with_a_hint(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    write_run(other, synthetic_run(ONE, model="another"))

    assert run([files[0], str(other)]) == 2
    assert "different models: 'identity' and 'another'" in capsys.readouterr().err
    assert run([files[0], str(other), "--any-model"]) in (0, 1)


@pytest.mark.parametrize("confidence", ["0", "100", "many"])
def test_a_confidence_that_cannot_be_is_misuse(confidence: str, files: tuple[str, str]) -> None:
    assert run([*files, "--confidence", confidence]) == 2


def test_markdown_has_the_verdict_and_a_row_for_each_figure(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "changes.md"

    assert run([*files, "--markdown", str(path)]) == 1

    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    printed = capsys.readouterr().out
    assert lines[0].startswith("## Worse: ")
    assert {row.count("|") for row in rows} == {8}
    assert sum(row.endswith("| **worse** |") for row in rows) == printed.count("WORSE")
    assert [row.split("|")[2].strip() for row in rows[2:4]] == ["throughput", "p50"]
    assert run([*files, "--markdown", str(tmp_path)]) == 2
