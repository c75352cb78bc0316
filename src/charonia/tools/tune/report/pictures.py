"""The plots of a configuration search as PNG files, drawn by matplotlib, which is an optional dependency.

They draw what the page draws: `plot_data` is the only source of both. The page draws with a script of its own, as its
plots answer to the pointer and the keyboard and it needs nothing that is not in its file.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from charonia.core.errors import unsupported
from charonia.tools.tune.report.plot_data import plot_data
from charonia.tools.tune.report.view import variant_views
from charonia.tools.tune.result import TuneRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES, _DOTS_AN_INCH = (9.0, 5.0), 150
_NAMED = ("#c2410c", "#0f766e", "#8b2f97", "#8a6d00")
_BEST, _DEFAULT, _OTHER, _LIMIT = "#0b63a8", "#5b6470", "#c3c9d0", "#9a3412"
_MILLISECOND, _SECOND = 1e6, 1e3
_NAME_LENGTH_MAX = 40
_GAINS_MAX = 20
_DWARFS = 10

# The page's colours and texts, as matplotlib wants them. Names are text, not formulas between dollar signs.
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.edgecolor": "#dfe2e6",
    "axes.labelcolor": "#5b6470",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": "#eceef1",
    "xtick.color": "#5b6470",
    "ytick.color": "#5b6470",
    "legend.frameon": False,
    "font.size": 10,
}

_PARTS = (
    ("outside", "Network and client", "#aab2bd"),
    ("other", "Server, other", "#6b7684"),
    ("cache", "Cache", "#b565b0"),
    ("queue", "Queue", "#d97706"),
    ("input", "Compute input", "#7c9dd8"),
    ("infer", "Compute infer", "#0b63a8"),
    ("output", "Compute output", "#3aa387"),
)


def require_matplotlib() -> None:
    """Look whether pictures can be drawn.

    Raises:
        ServingError: UNSUPPORTED where matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise unsupported(
            "pictures of the plots need the library matplotlib, which is not installed",
            hint="pip install 'charonia[plots]', or do without --png: the page of --html has the same plots",
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
    # A name in a script that the font does not have is drawn as boxes, which is no reason to speak up.
    with mpl.rc_context(_STYLE), warnings.catch_warnings():
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
    memory = "gpu_used_memory" if any("gpu_used_memory" in load["of"][place] for load in loads) else "cpu_used_ram"
    if any(_known(load["of"][place], memory) for load in loads):
        yield "memory", lambda axes: _memory(axes, group, place, memory)
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


def _looks(group: Mapping[str, Any]) -> list[tuple[dict[str, Any], str, str]]:
    """Return each variant with its colour and its name in the legend, "" for none, those that matter last."""
    colors = iter(_NAMED)
    looks = []
    for variant in group["variants"]:
        if variant["role"] in ("recommended", "closest"):
            color, name = _BEST, f"{_short(variant['name'])} ({variant['role']})"
        elif variant["default"]:
            color, name = _DEFAULT, _short(variant["name"])
        else:
            color = next(colors, _OTHER)
            name = _short(variant["name"]) if color != _OTHER else ""
        looks.append((variant, color, name))
    return looks[::-1]


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH_MAX else f"…{name[1 - _NAME_LENGTH_MAX :]}"


def _latency(axes: "Axes", group: Mapping[str, Any], place: int) -> None:
    name = group["latency"]
    for variant, color, label in _looks(group):
        points = [(load["batch"], load["of"][place]) for load in variant["loads"] if _known(load["of"][place], name)]
        for batch in dict.fromkeys(batch for batch, _ in points):
            line = [metrics for size, metrics in points if size == batch]
            axes.plot(
                [metrics["throughput"][0] for metrics in line],
                [metrics[name][0] / _MILLISECOND for metrics in line],
                color=color,
                label=label if batch == points[0][0] else "",
                marker="o",
                markersize=4 if label else 3,
                linewidth=1.8 if label else 0.8,
                linestyle="--" if variant["default"] else "-",
            )
    loads = [load["of"][place] for variant in group["variants"] for load in variant["loads"]]
    values = sorted(float(metrics[name][0]) for metrics in loads if _known(metrics, name))
    # Where the slowest dwarf the usual ones, a linear axis shows the slowest only.
    if values[0] > 0 and values[-1] > _DWARFS * values[len(values) // 2]:
        axes.set_yscale("log")
    for limit in group["limits"][place]:
        if limit["metric"] == name:
            axes.axhline(
                limit["value"] / _MILLISECOND, color=_LIMIT, linestyle="--", linewidth=1.2, label=limit["full"]
            )
        elif limit["metric"] == "perf_throughput":
            axes.axvline(limit["value"], color=_LIMIT, linestyle="--", linewidth=1.2, label=limit["full"])
    _finish(
        axes, f"{group['models'][place]}: latency against throughput", "Inferences per second", f"{name} latency in ms"
    )


def _memory(axes: "Axes", group: Mapping[str, Any], place: int, key: str) -> None:
    for variant, color, label in _looks(group):
        load = variant["loads"][variant["best"]] if variant["best"] >= 0 else None
        if load is not None and _known(load["of"][place], key):
            metrics = load["of"][place]
            axes.scatter([metrics["throughput"][0]], [metrics[key][0]], color=color, label=label, s=45 if label else 20)
    for limit in group["limits"][place]:
        if limit["metric"] == key:
            axes.axhline(limit["value"], color=_LIMIT, linestyle="--", linewidth=1.2, label=limit["full"])
    _finish(axes, f"{group['models'][place]}: memory against throughput", "Inferences per second", "Memory in MB")


def _breakdown(axes: "Axes", variant: Mapping[str, Any], place: int) -> None:
    rows = [(load["text"], load["parts"][place][0]) for load in variant["loads"] if load["parts"][place]]
    left = [0.0] * len(rows)
    for key, name, color in _PARTS:
        widths = [part.get(key, 0) / _MILLISECOND for _, part in rows]
        if any(widths):
            axes.barh([text for text, _ in rows], widths, left=left, color=color, label=name, height=0.6)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    _finish(axes, f"{_short(variant['name'])}: where the time of a mean request goes", "ms", "")


def _gains(axes: "Axes", variants: Sequence[Mapping[str, Any]]) -> None:
    axes.axvline(0, color=_DEFAULT, linewidth=1)
    for row, variant in enumerate(variants):
        value, low, high = variant["gain"]
        color = _BEST if low > 0 else _LIMIT if high < 0 else _DEFAULT
        axes.plot([low, high], [row, row], color=color, linewidth=3, alpha=0.45)
        axes.plot([value], [row], color=color, marker="o", markersize=6)
    axes.set_yticks(range(len(variants)), [_short(variant["name"]) for variant in variants])
    axes.invert_yaxis()
    _finish(axes, "Gain over the default configuration, with its interval", "%", "")


def _search(axes: "Axes", group: Mapping[str, Any]) -> None:
    measured = [trial for trial in group["trials"] if trial["throughput"] is not None]
    colors = (_DEFAULT, *_NAMED[1:], _BEST, _NAMED[0])
    for place, purpose in enumerate(dict.fromkeys(trial["purpose"] for trial in measured)):
        trials = [trial for trial in measured if trial["purpose"] == purpose]
        axes.scatter(
            [(trial["begin"] + trial["end"]) / 2 / _SECOND for trial in trials],
            [trial["throughput"] for trial in trials],
            color=colors[place % len(colors)],
            label=purpose,
            s=22,
        )
    _finish(axes, f"{' and '.join(group['models'])}: every measurement", "Seconds", "Inferences per second")


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
