"""The unit of examples/systemd: a command line that we understand, and times that fit together."""

import shlex
from configparser import ConfigParser
from pathlib import Path

import pytest

from charonia.cli.main import COMMANDS
from charonia.cli.serve import parse

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "examples" / "systemd" / "charonia.service"


@pytest.fixture
def unit() -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign] # names are case-sensitive
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


def test_its_command_line_serves_a_repository_within_the_time_to_stop(unit: ConfigParser) -> None:
    service = unit["Service"]
    program, command, *arguments = shlex.split(service["ExecStart"])

    options, notes = parse(arguments, dict([service["Environment"].split("=", 1)]))

    assert (Path(program).name, command) == ("charonia", "serve")
    assert options.models.repositories == ("/srv/models",)
    assert options.models.stores.cache == "/var/cache/charonia/stores"
    assert notes == ()
    # What the guard may take: the engine's margin, see charonia.server.guard.restarts.
    assert options.exit_timeout_secs + 15 < int(service["TimeoutStopSec"])


def test_a_reload_is_an_upgrade_of_its_main_process(unit: ConfigParser) -> None:
    program, command, pid = shlex.split(unit["Service"]["ExecReload"])

    assert (Path(program).name, command in COMMANDS, pid) == ("charonia", True, "$MAINPID")


def test_it_is_ready_when_the_models_are_and_is_watched(unit: ConfigParser) -> None:
    service = unit["Service"]

    assert (service["Type"], service["TimeoutStartSec"], service["Restart"]) == ("notify", "infinity", "always")
    assert int(service["WatchdogSec"]) > 0


def test_a_page_explains_each_line_of_the_service(unit: ConfigParser) -> None:
    page = (ROOT / "docs" / "guard.md").read_text(encoding="utf-8")

    assert [name for name in unit["Service"] if f"`{name}" not in page] == []
    assert "../examples/systemd/charonia.service" in page
