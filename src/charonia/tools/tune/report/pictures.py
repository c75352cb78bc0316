"""The plots of a configuration search as PNG files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from charonia.tools.report.drawing import MILLISECOND, Draw, breakdown, colors, finish, png_files, short
from charonia.tools.tune.report.plot_data import THROUGHPUT, TITLES, plot_data
from charonia.tools.tune.report.view import variant_views
from charonia.tools.tune.result import TuneRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SECOND = 1e3
_GAINS_MAX = 20
_FAINT = 0.3


def pictures(run: TuneRun) -> dict[str, bytes]:
    """Return PNG files by name: `resnet50-latency.png`, `-gain`, `-memory`, `-search` and `-breakdown`.

    Raises:
        ServingError: UNSUPPORTED where matplotlib is not installed.
    """
    data = plot_data(run, [variant_views(group) for group in run.groups])
    return png_files(plot for group in data["groups"] for plot in _plots(group))


def _plots(group: Mapping[str, Any]) -> Iterator[tuple[str, str, Draw]]:
    for place, model in enumerate(group["models"]):
        for kind, draw in _of_model(group, place):
            yield model, kind, _alone(draw)
    for kind, draw in _of_group(group):
        yield "-".join(group["models"]), kind, _alone(draw)


_Draw = Callable[["Axes"], None]


def _alone(draw: _Draw) -> Draw:
    def draw_into(figure: "Figure") -> None:
        draw(figure.add_subplot())

    return draw_into


def _of_model(group: Mapping[str, Any], place: int) -> Iterator[tuple[str, _Draw]]:
    loads = [load for variant in group["variants"] for load in variant["loads"]]
    if any(_known(load["of"][place], group["latency"]) for load in loads):
        yield "latency", lambda axes: _latency(axes, group, place)
    memories = (pair for pair in group["memories"] if any(_known(load["of"][place], pair[0]) for load in loads))
    if memory := next(memories, None):
        yield "memory", lambda axes: _memory(axes, group, place, *memory)
    best = next((variant for variant in group["variants"] if variant["role"] in ("recommended", "closest")), None)
    if best is not None and any(load["parts"][place] for load in best["loads"]):
        yield "breakdown", lambda axes: _breakdown(axes, best, place)


def _of_group(group: Mapping[str, Any]) -> Iterator[tuple[str, _Draw]]:
    gains = [variant for variant in group["variants"] if variant["gain"] is not None]
    if gains:
        yield "gain", lambda axes: _gains(axes, gains[:_GAINS_MAX])
    if any(trial["throughput"] is not None for trial in group["trials"]):
        yield "search", lambda axes: _search(axes, group)


def _known(metrics: Mapping[str, Any], name: str) -> bool:
    return metrics.get("throughput") is not None and metrics.get(name) is not None


def _looks(group: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each variant with the style of its points. Those with a colour of their own come last, on top."""
    order = sorted(group["variants"], key=lambda variant: not variant["shade"])
    return [(variant, _look(variant)) for variant in reversed(order)]


def _look(variant: Mapping[str, Any]) -> dict[str, Any]:
    if variant["shade"]:
        return {"color": colors()[variant["shade"]], "label": short(variant["label"])}
    return {"color": colors()["s5"], "label": "", "alpha": _FAINT}


def _latency(axes: "Axes", group: Mapping[str, Any], place: int) -> None:
    name = group["latency"]
    for variant, look in _looks(group):
        points = [(load["batch"], load["of"][place]) for load in variant["loads"] if _known(load["of"][place], name)]
        for batch in dict.fromkeys(batch for batch, _ in points):
            line = [metrics for size, metrics in points if size == batch]
            axes.plot(
                [metrics["throughput"][0] for metrics in line],
                [metrics[name][0] / MILLISECOND for metrics in line],
                **{**look, "label": look["label"] if batch == points[0][0] else ""},
                marker="o",
                markersize=4 if variant["shade"] else 3,
                linewidth=1.8 if variant["shade"] else 0.8,
                linestyle="--" if variant["default"] else "-",
            )
    axes.set_yscale(group["axes"][place])
    for limit in group["limits"][place]:
        if limit["metric"] == name:
            axes.axhline(limit["value"] / MILLISECOND, **_limit_look(limit))
        elif limit["metric"] == "perf_throughput":
            axes.axvline(limit["value"], **_limit_look(limit))
    finish(axes, f"{group['models'][place]}: {TITLES['latency']}", THROUGHPUT, f"{name} latency in ms")


def _limit_look(limit: Mapping[str, Any]) -> dict[str, Any]:
    return {"color": colors()["bad"], "linestyle": "--", "linewidth": 1.2, "label": limit["full"]}


def _memory(axes: "Axes", group: Mapping[str, Any], place: int, key: str, name: str) -> None:
    for variant, look in _looks(group):
        load = variant["loads"][variant["best"]] if variant["best"] >= 0 else None
        if load is not None and _known(load["of"][place], key):
            metrics = load["of"][place]
            axes.scatter([metrics["throughput"][0]], [metrics[key][0]], **look, s=45 if variant["shade"] else 20)
    for limit in group["limits"][place]:
        if limit["metric"] == key:
            axes.axhline(limit["value"], **_limit_look(limit))
    finish(axes, f"{group['models'][place]}: {TITLES['memory']}", THROUGHPUT, f"{name} in MB")


def _breakdown(axes: "Axes", variant: Mapping[str, Any], place: int) -> None:
    rows = [(load["text"], load["parts"][place][0]) for load in variant["loads"] if load["parts"][place]]
    breakdown(axes, rows, f"{short(variant['name'])}: {TITLES['breakdown']}")


def _gains(axes: "Axes", variants: Sequence[Mapping[str, Any]]) -> None:
    axes.axvline(0, color=colors()["soft"], linewidth=1)
    for row, variant in enumerate(variants):
        value, low, high = variant["gain"]
        color = colors()["good" if low > 0 else "bad" if high < 0 else "soft"]
        axes.plot([low, high], [row, row], color=color, linewidth=3, alpha=0.45)
        axes.plot([value], [row], color=color, marker="o", markersize=6)
    axes.set_yticks(range(len(variants)), [short(variant["name"]) for variant in variants])
    axes.invert_yaxis()
    finish(axes, TITLES["gain"], "%", "")


def _search(axes: "Axes", group: Mapping[str, Any]) -> None:
    measured = [trial for trial in group["trials"] if trial["throughput"] is not None]
    for purpose, shade in group["phases"]:
        trials = [trial for trial in measured if trial["purpose"] == purpose]
        axes.scatter(
            [(trial["begin"] + trial["end"]) / 2 / _SECOND for trial in trials],
            [trial["throughput"] for trial in trials],
            color=colors()[shade],
            label=purpose if trials else "",
            s=22,
        )
    finish(axes, f"{' and '.join(group['models'])}: {TITLES['search']}", "Seconds", THROUGHPUT)
