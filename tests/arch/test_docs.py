"""What a user can see is written down: every metric, every route, every page and every link."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_engine import FakeEngine

from charonia.cli import apply, deploy, environments, models, people, platform, rollout
from charonia.cli.command_line import CommandLine
from charonia.cli.convert import LINE as CONVERT
from charonia.cli.export import KSERVE
from charonia.cli.main import COMMANDS
from charonia.cli.perf import LINE as PERF
from charonia.cli.perf import OLD_NAMES, REFUSED
from charonia.cli.tune import PROFILE as TUNE
from charonia.server.http.frontend import HttpLimits, protocol_routes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "bench").glob("*.md"), *ROOT.glob("examples/*/*.md")])

PLATFORM: list[CommandLine[Any]] = [
    *(platform.LINE, deploy.LINE, apply.LINE),
    *(line for room in (models, environments, people, rollout) for line in room.RESOURCE.lines().values()),
]

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PLACEHOLDER = re.compile(r"\{\w+\}")
RPC = re.compile(r"^\s*rpc\s+(\w+)", re.MULTILINE)
METRIC = re.compile(r"\b(?:nv|charonia)_[a-z0-9_]+")


def links(page: Path) -> list[str]:
    return [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert [target for target in links(page) if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_anchor_of_a_link_is_a_heading(page: Path) -> None:
    found = [link for link in ANCHOR.findall(page.read_text(encoding="utf-8")) if "://" not in link[0]]

    assert [
        (target, anchor) for target, anchor in found if anchor not in anchors(page.parent / target if target else page)
    ] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a rendered page: its headings in lower case, with dashes for spaces."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached_from_the_index() -> None:
    linked = {(DOCS / target).resolve() for target in links(DOCS / "index.md")}

    assert [page.name for page in sorted(DOCS.glob("*.md")) if page.name != "index.md" and page not in linked] == []


def test_every_metric_is_documented() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    emitted = {
        name
        for path in (ROOT / "src" / "charonia" / "server").rglob("*.py")
        if "import Family" in path.read_text(encoding="utf-8") or path.parent.name == "metrics"
        for name in METRIC.findall(path.read_text(encoding="utf-8"))
    }

    assert sorted(name for name in emitted if name not in page) == []


def test_every_http_route_is_documented() -> None:
    # The page says once which paths take a version, and that the two kinds of shared memory have the same routes.
    page = PLACEHOLDER.sub("{}", (DOCS / "http.md").read_text(encoding="utf-8"))
    paths = {
        route.path.replace("/versions/{version}", "").replace("cudasharedmemory", "systemsharedmemory")
        for route in protocol_routes(FakeEngine(), HttpLimits())
    }

    assert sorted(path for path in paths if PLACEHOLDER.sub("{}", path) not in page) == []


def test_every_grpc_method_is_documented() -> None:
    page = (DOCS / "grpc.md").read_text(encoding="utf-8")
    methods = {
        name
        for path in (ROOT / "src" / "charonia" / "schema").glob("*.proto")
        for name in RPC.findall(path.read_text(encoding="utf-8"))
    }

    assert methods
    assert sorted(name for name in methods if name not in page) == []


def test_every_option_of_perf_is_documented_with_its_default() -> None:
    page = (DOCS / "perf.md").read_text(encoding="utf-8").replace("\\|", "|")
    rows = [
        f"`{option.name}{' ' if option.metavar else ''}{option.metavar}` | {PERF.default_text(option)} |"
        for option in PERF.options()
    ]

    assert [row for row in rows if row not in page] == []
    assert [option.name for option in (*OLD_NAMES, *REFUSED) if f"`{option.name}" not in page] == []


def test_every_option_of_tune_is_documented_with_its_default() -> None:
    page = (DOCS / "tune.md").read_text(encoding="utf-8").replace("\\|", "|")
    missing = []
    for option in TUNE.options():
        name = option.key if option.in_file_only else option.name
        if option.unsupported:
            missing += [name] * (f"`{name}`" not in page)
            continue
        start = f"| `{name}{' ' if option.metavar else ''}{option.metavar}`"
        end = f" | {TUNE.default_text(option)} | "
        missing += [name] * (not any(row.startswith(start) and end in row for row in page.splitlines()))

    assert missing == []


def test_every_option_of_convert_is_documented_with_its_default() -> None:
    page = (DOCS / "convert.md").read_text(encoding="utf-8")
    rows = [
        (f"| `{option.name}{' ' if option.metavar else ''}{option.metavar}`", f" | {CONVERT.default_text(option)} | ")
        for option in CONVERT.options()
        if option.name.startswith("--")
    ]

    assert [start for start, end in rows if not any(r.startswith(start) and end in r for r in page.splitlines())] == []


def test_every_option_of_export_kserve_is_documented_with_its_default() -> None:
    page = (DOCS / "kserve.md").read_text(encoding="utf-8").replace("\\|", "|")
    rows = [
        f"| `{option.name}{' ' if option.metavar else ''}{option.metavar}` | "
        f"{f'`{default}`' if (default := KSERVE.default_text(option)) else ''} | "
        for option in KSERVE.options()
        if option.name.startswith("--")
    ]

    assert [row for row in rows if row.replace("``", "") not in page] == []


@pytest.mark.parametrize("line", PLATFORM, ids=lambda line: line.command)
def test_every_option_of_the_platforms_commands_is_documented_with_its_default(line: CommandLine[Any]) -> None:
    page = (DOCS / "platform.md").read_text(encoding="utf-8").replace("\\|", "|")
    rows = [
        f"| `{option.name}{' ' if option.metavar else ''}{option.metavar}` | {line.default_text(option)} | "
        for option in line.options()
        if option.name.startswith("--")
    ]

    assert [row for row in rows if row not in page] == []


def test_every_command_is_documented() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)

    assert [name for name in COMMANDS if f"charonia {name}" not in pages] == []


def test_the_files_that_the_architecture_page_names_exist() -> None:
    named = set(re.findall(r"`([a-z_/]+\.(?:py|proto))`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")))
    package = ROOT / "src" / "charonia"
    places = (ROOT, package, package / "server", package / "server" / "backends" / "python", package / "tools" / "perf")

    assert named
    assert sorted(name for name in named if not any((place / name).is_file() for place in places)) == []
