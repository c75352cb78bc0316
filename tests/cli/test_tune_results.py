from pathlib import Path

from charonia.cli.tune_run import JSON_FILE, RESULTS, keep_earlier
from charonia.tools.tune.options import OutputSettings


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
