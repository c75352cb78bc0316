"""Options of perf_analyzer that are old names, and those that have no meaning here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """An option that is known and not in the table.

    Attributes:
        name: With its dashes.
        metavar: What its argument is, "" for an option without one.
        reason: Why it is refused, or what takes its place.
    """

    name: str
    metavar: str
    reason: str


DEPRECATED = (
    ForeignOption("-t", "N", "--concurrency-range"),
    ForeignOption("-c", "N", "--concurrency-range"),
    ForeignOption("-d", "", "--concurrency-range"),
    ForeignOption("-z", "", "--input-data zero"),
    ForeignOption("--data-directory", "FOLDER", "--input-data"),
)
"""Old names, with the new ones."""

_IN_PROCESS = "the server is measured over the wire only (hint: charonia serve MODELS, then charonia perf -m NAME)"
_LANGUAGE_MODELS = "chats of language models are not measured here"
_OTHER_SERVICE = "only servers of the KServe v2 protocol are measured"

REFUSED = (
    ForeignOption("--triton-server-directory", "FOLDER", _IN_PROCESS),
    ForeignOption("--model-repository", "FOLDER", _IN_PROCESS),
    ForeignOption("--enable-mpi", "", "MPI is not offered (hint: --processes sends from several processes)"),
    ForeignOption("--model-signature-name", "NAME", _OTHER_SERVICE),
    ForeignOption("--grpc-method", "METHOD", _OTHER_SERVICE),
    ForeignOption("--proto", "FILE", _OTHER_SERVICE),
    ForeignOption("--endpoint", "PATH", _LANGUAGE_MODELS),
    ForeignOption("--session-concurrency", "N", _LANGUAGE_MODELS),
    ForeignOption("--fixed-schedule", "", f"{_LANGUAGE_MODELS} (hint: --request-intervals replays gaps from a file)"),
)
"""Options whose behaviour is not here, with the reason."""

UNPARSED = "--proto"
"""In perf_analyzer's documentation and not in its parser, so that it takes no part in its prefixes."""


def with_new_names(values: dict[str, list[str]], problems: list[str], notes: list[str]) -> None:
    """Replace old names by the new ones, with a note for each.

    Args:
        values: Texts by name of the option; changed in place.
        problems: Gets what is wrong with old options.
        notes: Gets a sentence for every old name.
    """
    old = {option.name: values.pop(option.name) for option in DEPRECATED if option.name in values}
    notes += [f"{option.name} is an old name: use {option.reason}" for option in DEPRECATED if option.name in old]
    sources = old.get("--data-directory", []) + (["zero"] if "-z" in old else [])
    if sources:
        values["--input-data"] = values.get("--input-data", []) + sources
    levels = sorted(old.keys() & {"-t", "-c", "-d"})
    if not levels:
        return
    if "--concurrency-range" in values:
        problems.append(f"--concurrency-range: expected none of its old names with it, got {' '.join(levels)}")
        return
    if "-c" in old and "-d" not in old:
        problems.append("-c: expected -d with it, got none (hint: --concurrency-range START:END)")
    start = old.get("-t", ["1"])[-1]
    end = old.get("-c", ["0"])[-1]
    values["--concurrency-range"] = [f"{start}:{end}" if "-d" in old else start]
