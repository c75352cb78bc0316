"""Plots as PNG files, drawn by matplotlib, which is an optional dependency.

Data, labels and colours are those of the pages: they come from `plot_data` and from the style sheet. A page draws with
a script of its own, because its plots react to the pointer and the keyboard and its file needs nothing else.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from charonia.core.errors import unsupported
from charonia.install_hint import extra_hint
from charonia.tools.report.document import asset
from charonia.tools.report.plot_data import PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MILLISECOND = 1e6
"""Nanoseconds of it."""

_INCHES, _DOTS_AN_INCH = (9.0, 5.0), 150
_NAME_LENGTH_MAX = 40

_NINES = ("0", "90", "99", "99.9", "99.99", "99.999", "99.9999", "99.99999")

_COLOR = re.compile(r"--([\w-]+): (#[0-9a-f]{6});")

Draw = Callable[["Figure"], None]
"""Draws a plot into an empty figure."""


@cache
def colors() -> Mapping[str, str]:
    """Return the colours of the pages' light theme by their names."""
    light, _, _ = asset("charonia.tools.report", "page.css").partition("@media")
    return dict(_COLOR.findall(light))


def _style() -> dict[Any, Any]:
    return {
        "text.parse_math": False,  # names are text, not formulas between dollar signs
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.edgecolor": colors()["line"],
        "axes.labelcolor": colors()["soft"],
        "axes.titlelocation": "left",
        "axes.axisbelow": True,
        "grid.color": colors()["grid"],
        "xtick.color": colors()["soft"],
        "ytick.color": colors()["soft"],
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


def png_files(plots: Iterable[tuple[str, str, Draw]]) -> dict[str, bytes]:
    """Return a PNG file for each plot by its file name, `NAME-KIND.png`.

    Args:
        plots: What each is named after, its kind, and what draws it.

    Raises:
        ServingError: UNSUPPORTED where matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl

    found: dict[str, bytes] = {}
    # Letters that the font lacks are drawn as boxes: that is no reason for a warning.
    with mpl.rc_context(_style()), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name, kind, draw in plots:
            found[_file_name(name, kind, found)] = _png(draw)
    return found


def _file_name(name: str, kind: str, taken: Mapping[str, bytes]) -> str:
    base = re.sub(r"[^\w.-]+", "_", name)
    while f"{base}-{kind}.png" in taken:
        base += "_"
    return f"{base}-{kind}.png"


def _png(draw: Draw) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=_INCHES, layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15))
    FigureCanvasAgg(figure)
    draw(figure)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=_DOTS_AN_INCH, metadata={"Software": "charonia"})
    return out.getvalue()


def short(name: str) -> str:
    """Return the end of a name that is too long for a label."""
    return name if len(name) <= _NAME_LENGTH_MAX else f"…{name[1 - _NAME_LENGTH_MAX :]}"


def breakdown(axes: "Axes", rows: Sequence[tuple[str, Mapping[str, float]]], title: str) -> None:
    """Draw the parts of a mean request's time, a bar for each row of a label and the nanoseconds of its parts."""
    left = [0.0] * len(rows)
    for key, name in PARTS.items():
        widths = [part.get(key, 0) / MILLISECOND for _, part in rows]
        if any(widths):
            axes.barh([text for text, _ in rows], widths, left=left, color=colors()[f"p-{key}"], label=name, height=0.6)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    finish(axes, title, "ms", "")


def finish(axes: "Axes", title: str, x: str, y: str) -> None:
    """Set title, legend and names of the axes, which start at zero; without a name, the y axis has categories."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if y:
        axes.set_xlim(left=0)
        if axes.get_yscale() == "linear":
            axes.set_ylim(0, axes.dataLim.y1 * 1.08 or 1)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis, axes.yaxis) if y else (axes.xaxis,):
        axis.set_major_formatter("{x:,g}")
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)


def nines(axes: "Axes", last: float) -> None:
    """Name the places of an axis of quantiles `1 - 10 ** -x`, up to the last."""
    count = min(len(_NINES), 1 + int(last))
    axes.set_xticks(range(count), [f"{text} %" for text in _NINES[:count]])
