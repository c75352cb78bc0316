"""Formats numbers for people: three significant digits and a suitable unit; and aligns columns. Pure."""

import math
from collections.abc import Container, Sequence

_DURATIONS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def number(value: float) -> str:
    """Return a number with three significant digits, or all digits of its integer part: `0.123`, `12.3`, `12,345`."""
    for limit, digits in ((0.9995, 3), (9.995, 2), (99.95, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def duration(nanoseconds: float) -> str:
    """Return a duration: `470 µs`, `1.95 ms`."""
    for size, unit in _DURATIONS:
        # 999.9 µs must not become `1,000 µs`, nor 1023.9 KiB `1,024 KiB`.
        if nanoseconds >= 0.9995 * size:
            return f"{number(nanoseconds / size)} {unit}"
    return f"{nanoseconds:.0f} ns"


def size(byte_count: float) -> str:
    """Return an amount of memory: `150 MiB`."""
    for unit_size, unit in _SIZES:
        if byte_count >= 0.9995 * unit_size:
            return f"{number(byte_count / unit_size)} {unit}"
    return f"{byte_count:.0f} B"


def percent(share: float) -> str:
    """Return a share of 1 as a percentage: `0 %`, `0.012 %`, `12.3 %`."""
    if share == 0:
        return "0 %"
    return "< 0.001 %" if 0 < share < 0.000_005 else f"{number(100 * share)} %"


def signed_percent(share: float) -> str:
    """Return a change as a percentage with its sign: `+12.3 %`, `-0.4 %`."""
    return f"{100 * share:+,.1f} %"


def clock(seconds: float) -> str:
    """Return a time in whole seconds: `42 s`, `3 min 05 s`, `1 h 02 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def in_columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return rows as lines, in columns with two blanks between them; those in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def ruled(rows: Sequence[Sequence[str]], rule_max: float = math.inf) -> str:
    """Return a table of rows, the first of them on top of rules, which are no longer than `rule_max`."""
    rules = ["-" * int(min(max(map(len, column)), rule_max)) for column in zip(*rows, strict=True)]
    return "\n".join(in_columns([rows[0], rules, *rows[1:]]))
