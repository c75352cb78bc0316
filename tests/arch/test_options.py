"""An option is declared once: the help and the tables of the documentation say of it what its declaration says."""

from pathlib import Path
from typing import Any

import pytest

from charonia.cli import (
    apply,
    chat,
    config,
    convert,
    demo,
    deploy,
    doctor,
    environments,
    explain,
    export,
    infer,
    key,
    models,
    people,
    perf,
    platform,
    rollout,
    serve_options,
    traffic,
    tune,
    upgrade,
)
from charonia.cli.command_line import HELP_COLUMNS_MAX, CommandLine, Option

Line = CommandLine[Any]

DOCS = Path(__file__).parents[2] / "docs"

DOCUMENTED: list[tuple[str, Line]] = [
    ("serve", serve_options.LINE),
    ("perf", perf.LINE),
    ("tune", tune.PROFILE),
    ("convert", convert.LINE),
    ("kserve", export.KSERVE),
    ("serve_files", infer.LINE),
    ("openai", chat.LINE),
    ("explain", explain.LINE),
    *(("platform", line) for line in (platform.LINE, deploy.LINE, apply.LINE)),
    *(
        ("platform", line)
        for room in (models, environments, people, rollout)
        for line in room.RESOURCE.lines().values()
    ),
]
OTHERS: list[Line] = [
    *(perf.COMPARE, tune.REPORT, tune.APPLY, config.LINE, demo.LINE, doctor.LINE, key.LINE),
    *(traffic.LINE, upgrade.LINE),
]
LINES = [*(line for _, line in DOCUMENTED), *OTHERS]

in_every_command = pytest.mark.parametrize("line", LINES, ids=lambda line: line.command)


def shown(option: Option) -> str:
    return option.key if option.in_file_only else option.name


def everything(line: Line) -> list[Option]:
    return [*line.options(), *(option for options in line.unlisted.values() for option in options)]


def rows(page: str) -> list[tuple[str, str, str]]:
    """Return the option with its placeholder, the default and the text of each row of the options of a page."""
    found = []
    for line in (DOCS / f"{page}.md").read_text(encoding="utf-8").replace("\\|", "¦").replace("`", "").splitlines():
        cells = [cell.strip().replace("¦", "|") for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3:
            names = [name for name in cells[0].split(", ") if name.startswith("--")] or cells
            found.append((names[0].removesuffix(" (YAML)"), cells[1], cells[2]))
    return found


@pytest.mark.parametrize(("page", "line"), DOCUMENTED, ids=lambda value: getattr(value, "command", ""))
def test_the_page_has_every_option_with_its_default_and_its_help(page: str, line: Line) -> None:
    documented = rows(page)
    missing = [
        option.name
        for option in line.options()
        if option.name != option.place
        and not option.unsupported
        and not any(
            (name, default) == (f"{shown(option)} {option.metavar}".rstrip(), line.default_text(option))
            and (text == option.help.replace("`", "") or page == "platform")  # whose texts have links
            for name, default, text in documented
        )
    ]

    assert missing == []
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    if page in {"serve", "perf"}:
        assert [title for title in line.groups if f"# {title}\n" not in text] == []
    assert [option.name for option in everything(line) if option.unsupported and f"`{shown(option)}" not in text] == []


@in_every_command
def test_the_help_names_every_option(line: Line) -> None:
    text = line.help()

    assert [option.name for option in everything(line) if shown(option) not in text] == []


@in_every_command
@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_help_fits_a_terminal(line: Line, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))

    assert [text for text in line.help().splitlines() if len(text) > min(columns, HELP_COLUMNS_MAX)] == []


@in_every_command
def test_no_two_options_share_a_name(line: Line) -> None:
    names = [name for option in everything(line) for name in option.names.split()]

    assert len(names) == len(set(names))
