"""The plots of a configuration search as PNG files, drawn by matplotlib, which is an optional dependency.

The data, labels and colours are those of the page: they come from `plot_data` and from the style sheet. The page draws
with a script of its own, because its plots react to the pointer and the keyboard and its file needs nothing else.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from charonia.core.errors import unsupported
from charonia.install_hint import extra_hint
from charonia.tools.report.document import asset
from charonia.tools.report.plot_data import PARTS
from charonia.tools.tune.report.plot_data import THROUGHPUT, TITLES, plot_data
from charonia.tools.tune.report.view import variant_views
from charonia.tools.tune.result import TuneRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES, _DOTS_AN_INCH = (9.0, 5.0), 150
_MILLISECOND, _SECOND = 1e6, 1e3
_NAME_LENGTH_MAX = 40
_GAINS_MAX = 20
_FAINT = 0.3

_COLOR = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")


@cache
def _colors() -> Mapping[str, str]:
    """Return the colours of the page's light theme by their names."""
    light, _, _ = asset("charonia.tools.report", "page.css").partition("@media")
    return dict(_COLOR.findall(light))


def _style() -> dict[Any, Any]:
    colors = _colors()
    return {
        "text.parse_math": False,  # names are text, not formulas between dollar signs
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.edgecolor": colors["line"],
        "axes.labelcolor": colors["soft"],
        "axes.titlelocation": "left",
        "axes.axisbelow": True,
        "grid.color": colors["grid"],
        "xtick.color": colors["soft"],
        "ytick.color": colors["soft"],
        "legend.frameon": False,
        "font.size": 10,
    }


def require_matplotlib() -> None:
    """Check that pictures can be drawn.

    Raises:
        ServingError: UNSUPPORTED where matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise unsupported(
            "pictures of the plots need the library matplotlib, which is not installed",
            hint=f"{extra_hint('plots')}, or do without --png: the page of --html has the same plots",
        ) from None


def pictures(run: TuneRun) -> dict[str, bytes]:
    """Return PNG files by name: `resnet50-latency.png`, `-gain`, `-memory`, `-search` and `-breakdown`.

    Raises:
        ServingError: UNSUPPORTED where matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl

    data = plot_data(run, [variant_views(group) for group in run.groups])
    found: dict[str, bytes] = {}
    # Letters that the font lacks are drawn as boxes: that is no reason for a warning.
    with mpl.rc_context(_style()), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for group in data["groups"]:
            drawn = [(model, pair) for place, model in enumerate(group["models"]) for pair in _of_model(group, place)]
            drawn += [("-".join(group["models"]), pair) for pair in _of_group(group)]
            for name, (kind, draw) in drawn:
                found[_file_name(name, kind, found)] = _png(draw)
    return found


def _file_name(name: str, kind: str, taken: Mapping[str, bytes]) -> str:
    base = re.sub(r"[^\w.-]+", "_", name)
    while f"{base}-{kind}.png" in taken:
        base += "_"
    return f"{base}-{kind}.png"


_Draw = Callable[["Axes"], None]


def _png(draw: _Draw) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=_INCHES, layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=_DOTS_AN_INCH, metadata={"Software": "charonia"})
    return out.getvalue()


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
        return {"color": _colors()[variant["shade"]], "label": _short(variant["label"])}
    return {"color": _colors()["s5"], "label": "", "alpha": _FAINT}


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH_MAX else f"…{name[1 - _NAME_LENGTH_MAX :]}"


def _latency(axes: "Axes", group: Mapping[str, Any], place: int) -> None:
    name = group["latency"]
    for variant, look in _looks(group):
        points = [(load["batch"], load["of"][place]) for load in variant["loads"] if _known(load["of"][place], name)]
        for batch in dict.fromkeys(batch for batch, _ in points):
            line = [metrics for size, metrics in points if size == batch]
            axes.plot(
                [metrics["throughput"][0] for metrics in line],
                [metrics[name][0] / _MILLISECOND for metrics in line],
                **{**look, "label": look["label"] if batch == points[0][0] else ""},
                marker="o",
                markersize=4 if variant["shade"] else 3,
                linewidth=1.8 if variant["shade"] else 0.8,
                linestyle="--" if variant["default"] else "-",
            )
    axes.set_yscale(group["axes"][place])
    for limit in group["limits"][place]:
        if limit["metric"] == name:
            axes.axhline(limit["value"] / _MILLISECOND, **_limit_look(limit))
        elif limit["metric"] == "perf_throughput":
            axes.axvline(limit["value"], **_limit_look(limit))
    _finish(axes, f"{group['models'][place]}: {TITLES['latency']}", THROUGHPUT, f"{name} latency in ms")


def _limit_look(limit: Mapping[str, Any]) -> dict[str, Any]:
    return {"color": _colors()["bad"], "linestyle": "--", "linewidth": 1.2, "label": limit["full"]}


def _memory(axes: "Axes", group: Mapping[str, Any], place: int, key: str, name: str) -> None:
    for variant, look in _looks(group):
        load = variant["loads"][variant["best"]] if variant["best"] >= 0 else None
        if load is not None and _known(load["of"][place], key):
            metrics = load["of"][place]
            axes.scatter([metrics["throughput"][0]], [metrics[key][0]], **look, s=45 if variant["shade"] else 20)
    for limit in group["limits"][place]:
        if limit["metric"] == key:
            axes.axhline(limit["value"], **_limit_look(limit))
    _finish(axes, f"{group['models'][place]}: {TITLES['memory']}", THROUGHPUT, f"{name} in MB")


def _breakdown(axes: "Axes", variant: Mapping[str, Any], place: int) -> None:
    rows = [(load["text"], load["parts"][place][0]) for load in variant["loads"] if load["parts"][place]]
    left = [0.0] * len(rows)
    for key, name in PARTS.items():
        widths = [part.get(key, 0) / _MILLISECOND for _, part in rows]
        if any(widths):
            axes.barh(
                [text for text, _ in rows], widths, left=left, color=_colors()[f"p-{key}"], label=name, height=0.6
            )
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    _finish(axes, f"{_short(variant['name'])}: {TITLES['breakdown']}", "ms", "")


def _gains(axes: "Axes", variants: Sequence[Mapping[str, Any]]) -> None:
    axes.axvline(0, color=_colors()["soft"], linewidth=1)
    for row, variant in enumerate(variants):
        value, low, high = variant["gain"]
        color = _colors()["good" if low > 0 else "bad" if high < 0 else "soft"]
        axes.plot([low, high], [row, row], color=color, linewidth=3, alpha=0.45)
        axes.plot([value], [row], color=color, marker="o", markersize=6)
    axes.set_yticks(range(len(variants)), [_short(variant["name"]) for variant in variants])
    axes.invert_yaxis()
    _finish(axes, TITLES["gain"], "%", "")


def _search(axes: "Axes", group: Mapping[str, Any]) -> None:
    measured = [trial for trial in group["trials"] if trial["throughput"] is not None]
    for purpose, shade in group["phases"]:
        trials = [trial for trial in measured if trial["purpose"] == purpose]
        axes.scatter(
            [(trial["begin"] + trial["end"]) / 2 / _SECOND for trial in trials],
            [trial["throughput"] for trial in trials],
            color=_colors()[shade],
            label=purpose if trials else "",
            s=22,
        )
    _finish(axes, f"{' and '.join(group['models'])}: {TITLES['search']}", "Seconds", THROUGHPUT)


def _finish(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if y:
        axes.set_xlim(left=0)
        if axes.get_yscale() == "linear":
            axes.set_ylim(0, axes.dataLim.y1 * 1.08 or 1)
    for axis in (axes.xaxis, axes.yaxis) if y else (axes.xaxis,):
        axis.set_major_formatter("{x:,g}")
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
