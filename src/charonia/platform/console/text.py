"""Formats figures for people."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from markupsafe import Markup, escape

from charonia.platform.values import TIME_S_MAX

KINDS: Mapping[str, str] = {
    "ready": "good",
    "serving": "good",
    "done": "good",
    "finished": "good",
    "arriving": "wait",
    "checking": "wait",
    "waiting": "wait",
    "building": "wait",
    "running": "wait",
    "starting": "wait",
    "updating": "wait",
    "pending": "wait",
    "stopping": "wait",
    "paused": "wait",
    "degraded": "bad",
    "failed": "bad",
    "refused": "bad",
    "aborted": "bad",
    "rolled back": "bad",
}
"""The colour of each state that is not grey."""

_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_AGES = ((86400.0, "day", "days"), (3600.0, "hour", "hours"), (60.0, "min", "min"))
_AGO_S_MAX = 30 * 86400.0


def kind_of(state: str) -> str:
    """Return the colour of a state: "good", "wait", "bad" or "off"."""
    return KINDS.get(state, "off")


def figure(value: float) -> str:
    """Return a number with three significant digits: 0.0123, 4.56, 78.9, 12,345."""
    if value == 0 or not -1e15 < value < 1e15:
        return "0" if value == 0 else str(value)
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    digits = f"{value:.3g}"
    return digits if "e" not in digits else f"{value:.6f}".rstrip("0")


def size_text(size: float) -> str:
    """Return bytes: "98 MB"."""
    for unit, name in _SIZES:
        if size >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}"
    return "1 byte" if size == 1 else f"{size:.0f} bytes"


def duration_text(seconds: float) -> str:
    """Return a duration: "3 min 5 s", "42 s", "12.3 ms"."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    if seconds >= 60:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s".removesuffix(" 0 s")
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{figure(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{figure(seconds * 1e6)} µs"


def ago_text(then: float, now: float) -> str:
    """Return the time since a moment, or the date if that is long ago: "3 min ago", "2026-03-01"."""
    age = max(now - then, 0.0)
    if age > _AGO_S_MAX:
        return date_text(then)[:10]
    for unit, one, several in _AGES:
        if age >= unit:
            count = int(age // unit)
            return f"{count} {one if count == 1 else several} ago"
    return "just now"


def date_text(then: float) -> str:
    """Return a point in time, UTC: "2026-03-01 12:30:05"."""
    return datetime.fromtimestamp(min(then, TIME_S_MAX), UTC).strftime("%Y-%m-%d %H:%M:%S")


def percent(share: float) -> str:
    """Return a share as percent: "0.12 %"."""
    return f"{figure(100 * share)} %"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return the key to sort names by: "v2" before "v10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name.lower()) if part]


def breakable(name: str) -> Markup:
    """Return a name that may be broken after its separators."""
    return Markup("".join(f"{escape(c)}<wbr>" if c in "_.-/:" else escape(c) for c in name))  # noqa: S704 # every part is escaped
