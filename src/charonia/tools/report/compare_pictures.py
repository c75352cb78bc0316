"""The plots of a comparison as PNG files: the changes with their intervals, and the curves of both runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from charonia.tools.report.compare import Comparison, MetricChange, Outcome
from charonia.tools.report.drawing import MILLISECOND, Draw, colors, finish, nines, png_files, short
from charonia.tools.report.plot_data import TITLES, plot_data
from charonia.tools.results.records import PerfRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {Outcome.BETTER: "good", Outcome.WORSE: "bad", Outcome.SAME: "soft", Outcome.UNKNOWN: "line"}
_ROW_INCHES, _MARGIN_INCHES = 0.28, 1.3
_PERCENTILES = (50.0, 99.0)
_STYLES = ("-", "--")


def comparison_pictures(
    comparison: Comparison, runs: tuple[PerfRun, PerfRun], names: tuple[str, str]
) -> dict[str, bytes]:
    """Return PNG files by name: `resnet50-changes.png`, `-latency` and `-distribution`.

    Args:
        comparison: The comparison.
        runs: The runs, the earlier first.
        names: Their names.

    Raises:
        ServingError: UNSUPPORTED where matplotlib is not installed.
    """
    model = runs[1].model.name
    return png_files((model, kind, draw) for kind, draw in _plots(comparison, runs, names, model))


def _plots(
    comparison: Comparison, runs: tuple[PerfRun, PerfRun], names: tuple[str, str], model: str
) -> Iterator[tuple[str, Draw]]:
    yield "changes", lambda figure: _changes(figure, comparison, f"{model}: changes")
    labels = [f"{when}: {short(name)}" for when, name in zip(("before", "after"), names, strict=True)]
    data = plot_data(runs, labels)
    answered = [[level for level in run["levels"] if level["requests"]] for run in data["runs"]]
    if max(map(len, answered)) > 1:
        yield "latency", lambda figure: _latency(figure, answered, labels, data, f"{model}: {TITLES['tradeoff']}")
    common = [level["label"] for level in answered[0] if level["label"] in {other["label"] for other in answered[1]}]
    if common:
        best = next((level["label"] for level in answered[1] if level["best"]), "")
        shown = best if best in common else common[-1]
        curves = [next(level for level in levels if level["label"] == shown) for levels in answered]
        title = f"{model}: {TITLES['distribution']}, {shown}"
        yield "distribution", lambda figure: _distribution(figure, curves, labels, title)


def _changes(figure: "Figure", comparison: Comparison, title: str) -> None:
    rows = [(level.level, change) for level in comparison.levels for change in level.changes if _is_worth(change)]
    figure.set_figheight(_MARGIN_INCHES + _ROW_INCHES * len(rows))
    axes = figure.add_subplot()
    axes.axvline(0, color=colors()["soft"], linewidth=1)
    shown: set[Outcome] = set()
    for place, (_, change) in enumerate(rows):
        found, outcome = change.difference, change.outcome
        color = colors()[_COLORS[outcome]]
        if outcome is not Outcome.UNKNOWN:
            axes.plot([100 * found.low, 100 * found.high], [place, place], color=color, linewidth=3, alpha=0.45)
        label = "" if outcome in shown else outcome.value
        axes.plot([100 * found.value], [place], "o", color=color, markersize=6, label=label)
        shown.add(outcome)
    axes.set_yticks(range(len(rows)), [f"{level}  {change.figure}" for level, change in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    finish(axes, title, "Change in % (of errors: in percentage points)", "")


def _is_worth(change: MetricChange) -> bool:
    return change.figure != "errors" or bool(change.before or change.after)


def _latency(
    figure: "Figure",
    runs: Sequence[Sequence[Mapping[str, Any]]],
    labels: Sequence[str],
    data: Mapping[str, Any],
    title: str,
) -> None:
    axes = figure.add_subplot()
    for place, (levels, label) in enumerate(zip(runs, labels, strict=True)):
        throughputs = [level["throughput"][0] for level in levels]
        for percent, style in zip(_PERCENTILES, _STYLES, strict=True):
            at = data["percentiles"].index(percent)
            latencies = [level["latencies"][at] / MILLISECOND for level in levels]
            text = f"p{percent:g}, {label}"
            axes.plot(throughputs, latencies, style, color=colors()[f"s{place}"], label=text, marker="o", markersize=4)
    axes.set_yscale(data["axis"])
    finish(axes, title, "Inferences per second", "Latency in ms")


def _distribution(figure: "Figure", levels: Sequence[Mapping[str, Any]], labels: Sequence[str], title: str) -> None:
    axes = figure.add_subplot()
    for place, (level, label) in enumerate(zip(levels, labels, strict=True)):
        curve = level["curve"]
        latencies = [value / MILLISECOND for value in curve["response"]]
        axes.plot(curve["x"], latencies, color=colors()[f"s{place}"], label=label)
    axes.set_yscale("log")
    finish(axes, title, "Percentile", "Latency in ms")
    nines(axes, max(level["curve"]["x"][-1] for level in levels))
