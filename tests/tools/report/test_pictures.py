"""The plots of a run as PNG files."""

import io
import struct
import sys
from dataclasses import replace

import pytest
from tests.support.runs import FakeService, synthetic_run

from charonia.core.errors import ServingError
from charonia.install_hint import extra_hint
from charonia.tools.report.compare import compare
from charonia.tools.report.compare_pictures import comparison_pictures
from charonia.tools.report.drawing import require_matplotlib
from charonia.tools.report.pictures import pictures
from charonia.tools.results.records import LoadLevel, LoadMode

PNG = b"\x89PNG\r\n\x1a\n"
SEVERAL = tuple(LoadLevel(LoadMode.CONCURRENCY, value) for value in range(1, 10))


def test_each_plot_is_a_picture_named_after_the_model() -> None:
    found = pictures(synthetic_run(SEVERAL, error_share=0.1, model="a/$x^{"))

    kinds = ("load", "latency", "distribution", "timeline", "breakdown")
    assert list(found) == [f"a_x_-{kind}.png" for kind in kinds]
    for content in found.values():
        stream = io.BytesIO(content)
        assert stream.read(8) == PNG
        assert struct.unpack(">II", stream.read(16)[8:]) == (1350, 750)


def test_one_level_has_no_picture_of_a_curve_through_one_point() -> None:
    found = pictures(synthetic_run((LoadLevel(LoadMode.REQUEST_RATE, 500),)))

    assert list(found) == ["identity-distribution.png", "identity-timeline.png", "identity-breakdown.png"]


def test_a_run_in_which_nothing_was_measured_has_no_pictures() -> None:
    assert pictures(replace(synthetic_run(), levels=())) == {}


def test_without_matplotlib_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(ServingError, match="matplotlib") as caught:
        require_matplotlib()

    assert extra_hint("plots") in caught.value.hint


def test_a_comparison_has_pictures_of_its_changes_and_of_both_runs() -> None:
    several = synthetic_run(SEVERAL[:3], seed=1), synthetic_run(SEVERAL[:4], FakeService(600_000), seed=2)
    one = synthetic_run(SEVERAL[:1], seed=1, error_share=0.1), synthetic_run(SEVERAL[:1], seed=2)

    of_several = comparison_pictures(compare(*several), several, ("a.json", "b.json"))
    of_one = comparison_pictures(compare(*one), one, ("a.json", "b.json"))

    assert list(of_several) == ["identity-changes.png", "identity-latency.png", "identity-distribution.png"]
    assert list(of_one) == ["identity-changes.png", "identity-distribution.png"]
    assert all(content.startswith(PNG) for content in (*of_several.values(), *of_one.values()))
