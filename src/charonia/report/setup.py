"""What was not the same around two runs."""

from collections.abc import Iterator

from charonia.results.records import Run

_FILES = ("csv", "json", "html", "profile-export-file", "verbose-csv", "verbose", "quiet", "no-progress")


def setup_differences(before: Run, after: Run) -> tuple[str, ...]:
    """Return what differed in server, model, machine and options, one line each: `batch size: 1 -> 8`."""
    return tuple(
        f"{name}: {first or 'none'} -> {second or 'none'}"
        for (name, first), (_, second) in zip(_facts(before), _facts(after), strict=True)
        if first != second
    ) + tuple(_option_differences(before.options, after.options))


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    yield "tool", run.tool
    yield "model", run.model.name
    yield "version of the model", run.model.version
    yield "platform", run.model.platform
    yield "batch size", str(run.batch_size)
    yield "protocol", run.server.protocol
    yield "server", f"{run.server.name} {run.server.version}".strip()
    yield "url", run.server.url
    yield "machine of the client", run.machine.host
    yield "processor", run.machine.processor
    yield "cores", str(run.machine.core_count)
    yield "system", run.machine.system
    yield "Python", run.machine.python


def _option_differences(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    for name in [*before, *(name for name in after if name not in before)]:
        first, second = before.get(name), after.get(name)
        if first != second and name.lstrip("-") not in _FILES:
            yield f"option {name}: {'default' if first is None else first} -> {'default' if second is None else second}"
