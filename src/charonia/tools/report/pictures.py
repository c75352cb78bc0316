"""The plots of a run as PNG files."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from charonia.tools.report.drawing import MILLISECOND, Draw, breakdown, colors, finish, nines, png_files
from charonia.tools.report.plot_data import TITLES, plot_data
from charonia.tools.results.records import PerfRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVES_MAX = 6
_SECOND = 1e3
_PERCENTILES_BY_LOAD = (0, 2, 3)  # of `PERCENTILES`: the median, p95 and p99
_LOG_FROM = 8


def pictures(run: PerfRun) -> dict[str, bytes]:
    """Return PNG files by name: `resnet50-load.png`, `-latency`, `-distribution`, `-timeline` and `-breakdown`.

    A language model also has `-ttft` and `-itl`.

    Raises:
        ServingError: UNSUPPORTED where matplotlib is not installed.
    """
    return png_files((run.model.name, kind, draw) for kind, draw in _plots(run.model.name, plot_data([run], [""])))


def _plots(model: str, data: Mapping[str, Any]) -> Iterator[tuple[str, Draw]]:
    axis, levels = data["runs"][0]["axis"], data["runs"][0]["levels"]
    titles = {kind: f"{model}: {title}" for kind, title in TITLES.items()}
    answered = [level for level in levels if level["requests"]]
    if len(answered) > 1:
        by_load = sorted(answered, key=lambda level: level["load"])
        yield "load", lambda figure: _load(figure, by_load, data, titles["load"])
        yield "latency", lambda figure: _latency(figure, by_load, data, titles["tradeoff"])
    if answered:
        yield "distribution", lambda figure: _distribution(figure, answered, titles["distribution"])
    for kind in ("ttft", "itl"):
        found = [{**level, "curve": level[kind]} for level in answered if kind in level]
        if found:
            yield kind, partial(_distribution, levels=found, title=titles[kind])
    timed = [level for level in levels if level["time"]["begin"]]
    if timed:
        yield "timeline", lambda figure: _timeline(figure, timed, axis, titles["timeline"])
    rows = [(level["label"], level["parts"][0]) for level in levels if level["parts"]]
    if rows:
        yield "breakdown", lambda figure: breakdown(figure.add_subplot(), rows, titles["parts"])


def _load(figure: "Figure", levels: Sequence[Mapping[str, Any]], data: Mapping[str, Any], title: str) -> None:
    rates = figure.add_subplot(2, 1, 1)
    latencies = figure.add_subplot(2, 1, 2, sharex=rates)
    loads = [level["load"] for level in levels]
    values, lows, highs = zip(*(level["throughput"] for level in levels), strict=True)
    rates.fill_between(loads, lows, highs, color=colors()["s0"], alpha=0.15, linewidth=0)
    rates.plot(loads, values, color=colors()["s0"], marker="o", markersize=4)
    rates.set_ylim(bottom=0)
    for place in _PERCENTILES_BY_LOAD:
        label = f"p{data['percentiles'][place]:g}"
        times = [level["latencies"][place] / MILLISECOND for level in levels]
        latencies.plot(loads, times, color=colors()[f"s{place}"], label=label, marker="o", markersize=4)
    latencies.set_yscale(data["axis"])
    if loads[-1] > _LOG_FROM * loads[0]:
        rates.set_xscale("log")
    rates.set_xticks(loads, [level["value"] for level in levels])
    rates.minorticks_off()
    name = levels[0]["label"].removesuffix(levels[0]["value"]).strip()
    finish(rates, title, "", data["work"])
    finish(latencies, "", name.capitalize(), "Latency in ms")


def _latency(figure: "Figure", levels: Sequence[Mapping[str, Any]], data: Mapping[str, Any], title: str) -> None:
    axes = figure.add_subplot()
    throughputs = [level["throughput"][0] for level in levels]
    peak = throughputs.index(max(throughputs))
    for place, percent in enumerate(data["percentiles"]):
        latencies = [level["latencies"][place] / MILLISECOND for level in levels]
        color, end = colors()[f"s{place}"], peak + 1
        axes.plot(throughputs[:end], latencies[:end], color=color, label=f"p{percent:g}", marker="o", markersize=4)
        # Beyond the peak, more load brings no more throughput: dashed and hollow.
        axes.plot(throughputs[peak:], latencies[peak:], color=color, linestyle="--", linewidth=1)
        axes.plot(throughputs[end:], latencies[end:], "o", color=color, markersize=4, markerfacecolor="none")
    axes.set_yscale(data["axis"])
    for level, throughput in zip(levels, throughputs, strict=True):
        at = (throughput, level["latencies"][0] / MILLISECOND)
        axes.annotate(level["value"], at, (0, -13), textcoords="offset points", ha="center", color=colors()["soft"])
    finish(axes, title, data["work"], "Latency in ms")


def _distribution(figure: "Figure", levels: Sequence[Mapping[str, Any]], title: str) -> None:
    axes = figure.add_subplot()
    shown = _spread(len(levels), next((place for place, level in enumerate(levels) if level["best"]), 0))
    for place in shown:
        level, color = levels[place], colors()[f"s{shown.index(place) % _CURVES_MAX}"]
        curve = level["curve"]
        for values, style in ((curve["response"], "-"), (curve["service"], "--")):
            if values:
                label = level["label"] if style == "-" else ""
                axes.plot(curve["x"], [value / MILLISECOND for value in values], style, color=color, label=label)
    axes.set_yscale("log")
    if any(level["curve"]["service"] for level in levels):
        axes.plot([], [], "--", color=colors()["soft"], label="service time")
    finish(axes, title, "Percentile", "Latency in ms")
    nines(axes, max(levels[place]["curve"]["x"][-1] for place in shown))


def _spread(count: int, best: int) -> list[int]:
    """Return the places of at most so many curves as can be told apart: the ends, those between, and the best."""
    if count <= _CURVES_MAX:
        return list(range(count))
    others = _CURVES_MAX - 2
    return sorted({best, *(round(step * (count - 1) / others) for step in range(others + 1))})


def _timeline(figure: "Figure", levels: Sequence[Mapping[str, Any]], axis: str, title: str) -> None:
    rates = figure.add_subplot(2, 1, 1)
    latencies = figure.add_subplot(2, 1, 2, sharex=rates)
    for first, level in enumerate(levels):
        time = level["time"]
        middles = [(begin + end) / 2 / _SECOND for begin, end in zip(time["begin"], time["end"], strict=True)]
        for key, name, color, style in (("sent", "sent", "s5", "--"), ("done", "answered", "s0", "-")):
            rates.plot(middles, time[key], style, color=colors()[color], label="" if first else name)
        if any(time["errors"]):
            rates.plot(middles, time["errors"], color=colors()["bad"], label=_new(rates, "errors"))
        for key, name, color in (("max", "slowest", "s5"), ("p99", "p99", "s1"), ("p50", "p50", "s0")):
            # Where no request ended, there is no latency.
            values = [
                value / MILLISECOND if done else float("nan")
                for value, done in zip(time[key], time["done"], strict=True)
            ]
            latencies.plot(middles, values, color=colors()[color], label="" if first else name, linewidth=1.2)
        for begin, end in level["windows"]:
            for axes in (rates, latencies):
                axes.axvspan(begin / _SECOND, end / _SECOND, color=colors()["s0"], alpha=0.06, linewidth=0)
    latencies.set_yscale(axis)
    finish(rates, title, "", "Requests per second")
    finish(latencies, "", "Seconds", "Latency in ms")


def _new(axes: "Axes", label: str) -> str:
    """Return a label, "" if the legend has it."""
    return "" if label in axes.get_legend_handles_labels()[1] else label
