"""The table of `charonia convert`: how far the converted model's answers are from the original's. Pure."""

from collections.abc import Sequence

from charonia.server.convert.check import OutputDifference

_HEADINGS = ("output", "datatype", "shape", "max absolute", "max relative", "beyond tolerance")


def table(differences: Sequence[OutputDifference]) -> str:
    """Return a row for each output."""
    rows = [_HEADINGS, *map(_row, differences)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(difference: OutputDifference) -> tuple[str, ...]:
    dims = ", ".join(map(str, difference.shape))
    beyond = f"{difference.beyond:,} of {difference.elements:,}" if difference.beyond else "none"
    if difference.is_exact:
        apart = ("equal", "") if not difference.beyond else ("differs", "")
    else:
        apart = (f"{difference.absolute:.2g}", f"{difference.relative:.2g}")
    return (difference.name, difference.datatype.wire, f"[{dims}]", *apart, beyond)
