"""What a user can see is written down: every metric, every route, every page and every link."""

import re
from pathlib import Path

import pytest
from tests.support.fake_engine import FakeEngine

from charonia.cli.main import COMMANDS
from charonia.server.http.frontend import HttpLimits, protocol_routes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "bench").glob("*.md"), *ROOT.glob("examples/*/*.md")])

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


def test_every_command_is_documented() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)

    assert [name for name in COMMANDS if f"charonia {name}" not in pages] == []


def test_the_files_that_the_architecture_page_names_exist() -> None:
    named = set(re.findall(r"`([a-z_/]+\.(?:py|proto))`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")))
    package = ROOT / "src" / "charonia"
    places = (ROOT, package, package / "server", package / "server" / "backends" / "python", package / "tools" / "perf")

    assert named
    assert sorted(name for name in named if not any((place / name).is_file() for place in places)) == []
