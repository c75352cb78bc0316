import pytest

from charonia.cli.serve import models_table, started_line, summary
from charonia.core.metadata import ModelIndexEntry, ModelState

ENTRIES = [
    ModelIndexEntry("bert", "1", ModelState.READY),
    ModelIndexEntry("bert", "2", ModelState.UNAVAILABLE, "model.onnx: no such file"),
    ModelIndexEntry("text-recognition", "", ModelState.UNAVAILABLE, "two problems:\nname: wrong\ninput[0]: no dims"),
    ModelIndexEntry("never-asked-for"),
]


def test_the_table_is_aligned_and_keeps_long_reasons_in_their_column() -> None:
    assert models_table(ENTRIES).splitlines() == [
        "Model             Version  Status",
        "----------------  -------  -------------------------------------",
        "bert              1        READY",
        "bert              2        UNAVAILABLE: model.onnx: no such file",
        "text-recognition  -        UNAVAILABLE: two problems:",
        "                           name: wrong",
        "                           input[0]: no dims",
        "never-asked-for   -        not loaded",
    ]


def test_a_state_without_a_reason_stands_alone() -> None:
    assert models_table([ModelIndexEntry("m", "1", ModelState.LOADING)]).splitlines()[-1] == "m      1        LOADING"


def test_an_empty_table_is_its_headings() -> None:
    assert models_table([]).splitlines() == ["Model  Version  Status", "-----  -------  ------"]


def test_the_summary_counts_what_was_asked_for() -> None:
    assert summary(ENTRIES) == "1 of 3 model versions ready"


@pytest.mark.parametrize(
    ("address", "line"),
    [
        ("0.0.0.0", "Started HTTPService at 0.0.0.0:8000"),
        ("::1", "Started HTTPService at [::1]:8000"),
    ],
)
def test_the_line_that_scripts_wait_for(address: str, line: str) -> None:
    assert started_line("HTTPService", address, 8000) == line
