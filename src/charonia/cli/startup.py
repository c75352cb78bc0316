"""What the log says when a server has started: the table of models, then where it listens. Pure."""

from collections.abc import Sequence

from charonia.core.metadata import ModelIndexEntry, ModelState

HEADINGS = ("Model", "Version", "Status")
_GAP = "  "


def models_table(entries: Sequence[ModelIndexEntry]) -> str:
    """Return the models as a table: name, version, state with the reason where it is not ready.

    A reason of several lines stays in its column.
    """
    rows = [[entry.name, entry.version or "-", *status_lines(entry)] for entry in entries]
    name_width = max(len(row[0]) for row in [list(HEADINGS), *rows])
    version_width = max(len(row[1]) for row in [list(HEADINGS), *rows])
    status_width = max((len(line) for row in rows for line in row[2:]), default=0)
    indent = " " * (name_width + version_width + 2 * len(_GAP))
    lines = [
        _GAP.join((HEADINGS[0].ljust(name_width), HEADINGS[1].ljust(version_width), HEADINGS[2])),
        _GAP.join(("-" * name_width, "-" * version_width, "-" * min(max(status_width, len(HEADINGS[2])), 60))),
    ]
    for name, version, status, *further in rows:
        lines.append(_GAP.join((name.ljust(name_width), version.ljust(version_width), status)))
        lines += [indent + line for line in further]
    return "\n".join(lines)


def status_lines(entry: ModelIndexEntry) -> list[str]:
    """Return the state of a model version, and why, in lines."""
    if entry.state is None:
        return ["not loaded"]
    if entry.state is ModelState.READY or not entry.reason:
        return [entry.state.value]
    return f"{entry.state.value}: {entry.reason}".split("\n")


def summary(entries: Sequence[ModelIndexEntry]) -> str:
    """Return how many model versions are ready, of how many that should be."""
    asked = [entry for entry in entries if entry.state is not None]
    ready = sum(entry.state is ModelState.READY for entry in asked)
    return f"{ready} of {len(asked)} model versions ready"


def started_line(service: str, address: str, port: int) -> str:
    """Return the line that start scripts wait for."""
    host = f"[{address}]" if ":" in address else address
    return f"Started {service} at {host}:{port}"
