"""`charonia perf compare BEFORE AFTER`: significant changes between two runs.

Exit status: 0 no figure got worse, 1 a figure got worse, 2 misuse or files that cannot be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.values import number
from charonia.core.errors import unavailable


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """The runs to compare, and what counts as a change."""

    before: Path = Path()
    after: Path = Path()
    json: bool = False
    html: Path | None = None
    markdown: Path | None = None
    confidence: float = 95.0
    threshold: float = 2.0
    any_model: bool = False


# fmt: off
LINE = CommandLine(
    command="charonia perf compare",
    intro="""\
usage: charonia perf compare [OPTIONS] BEFORE AFTER

Compare two runs level by level: significant changes, and noise.
""",
    groups={
        "Options": (
            Option("BEFORE", "before", Path, "BEFORE", "File that `charonia perf --json` wrote", default=""),
            Option("AFTER", "after", Path, "AFTER", "File of a later run", default=""),
            flag("--json", "json", True, "Print JSON instead of a table"),
            Option("--html", "html", Path, "FILE", "Also write a page: the changes, and both runs with plots",
                   default=""),
            Option("--markdown", "markdown", Path, "FILE", "Also write the changes as Markdown", default=""),
            Option("--confidence -c", "confidence", number(50, 99.99), "PERCENT",
                   "Probability that all intervals hold"),
            Option("--threshold -t", "threshold", number(0, 1000), "PERCENT", "Smallest change that counts"),
            flag("--any-model", "any_model", True, "Also compare runs of models with different names"),
        )
    },
    record=CompareOptions(),
    epilog="Exit status: 0 no figure got worse, 1 a figure got worse, 2 misuse or files that cannot be compared.",
)
# fmt: on


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _compare, failed=2)


def _compare(given: CompareOptions) -> int:
    # Imported late, because `--help` does not need numpy.
    from charonia.tools.report.compare import Criteria, Outcome, compare
    from charonia.tools.report.compare_text import as_json, as_text
    from charonia.tools.report.markdown import render_comparison
    from charonia.tools.report.run_files import read_run, write_whole

    before, after = (read_run(path) for path in (given.before, given.after))
    criteria = Criteria(given.confidence / 100, given.threshold / 100)
    found = compare(before, after, criteria, any_model=given.any_model)
    show = as_json if given.json else as_text
    names = (str(given.before), str(given.after))
    files: dict[Path, bytes] = {}
    if given.html is not None:
        from charonia.tools.report.compare_html import comparison_page

        files[given.html] = comparison_page(found, (before, after), names)
    if given.markdown is not None:
        files[given.markdown] = render_comparison(found, names).encode()
    for path, content in files.items():
        try:
            write_whole(path, content)
        except OSError as error:
            raise unavailable(f"{path}: cannot be written: {error.strerror}") from None
    print(show(found, names))
    return 1 if found.outcome in (Outcome.WORSE, Outcome.MIXED) else 0
