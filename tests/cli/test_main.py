import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from charonia import __version__
from charonia.cli import main as command
from charonia.cli.main import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0

    printed = capsys.readouterr().out
    assert [name for name in COMMANDS if f"  {name} " not in printed] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_module_with_run(name: str) -> None:
    assert callable(importlib.import_module(f"charonia.cli.{name}").run)


def test_without_arguments_the_help_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2

    assert "usage: charonia COMMAND" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0

    assert capsys.readouterr().out == f"charonia {__version__}\n"


@pytest.mark.parametrize(
    ("name", "reaction"),
    [
        ("sevre", "charonia: unknown command 'sevre' (hint: did you mean serve?)\n"),
        (
            "--http-port",
            "charonia: unknown option '--http-port' (hint: options follow the command: charonia serve --http-port)",
        ),
        ("xyzzy", "charonia: unknown command 'xyzzy' (hint: known are serve, infer, "),
    ],
)
def test_an_unknown_command_is_misuse(name: str, reaction: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2

    assert capsys.readouterr().err.startswith(reaction)


def test_a_command_gets_the_arguments_behind_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        seen.append(arguments)
        return 7

    monkeypatch.setattr(command, "import_module", lambda name: SimpleNamespace(run=run))

    assert main(["config", "models/bert", "--json"]) == 7
    assert seen == [["models/bert", "--json"]]


def test_help_with_the_name_of_a_command_explains_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    monkeypatch.setattr(command, "import_module", lambda name: SimpleNamespace(run=lambda given: seen.append(given)))

    main(["help", "config"])
    assert seen == [["--help"]]


def test_help_with_another_name_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "confg"]) == 2

    assert "unknown command 'confg' (hint: did you mean config?)" in capsys.readouterr().err


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "import_module", lambda name: SimpleNamespace(run=interrupted))

    assert main(["config"]) == 130


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it is Linux'")
@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--models-only"]])
def test_a_full_disk_is_said_without_a_traceback(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "charonia", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )

    said = "charonia: the output cannot be written: no space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_a_reader_that_leaves_early_causes_no_traceback(arguments: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "charonia", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()

    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()

    process.wait(timeout=200)
    assert errors == ""
