from tests.support.tune_runs import synthetic_tune_run

from charonia.tools.tune.report.pictures import pictures

PNG = b"\x89PNG\r\n\x1a\n"


def test_each_plot_is_a_picture_named_after_its_model() -> None:
    found = pictures(synthetic_tune_run(latency_max_ms=60.0))

    assert sorted(found) == [
        "mlp-breakdown.png",
        "mlp-gain.png",
        "mlp-latency.png",
        "mlp-memory.png",
        "mlp-search.png",
    ]
    assert all(content.startswith(PNG) for content in found.values())


def test_names_are_neither_formulas_nor_paths() -> None:
    found = pictures(synthetic_tune_run("a/../$x^{", "a/../$x^[", latency_max_ms=60.0, has_levels=False))

    assert "a_.._x_-latency.png" in found
    assert "a_.._x__-latency.png" in found
    assert not any("/" in name for name in found)


def test_where_nothing_was_measured_there_are_no_pictures() -> None:
    assert pictures(synthetic_tune_run(refuses=lambda variant: "no")) == {}
