from pathlib import Path

import pytest

from charonia.cli.main import main
from charonia.server.access.rules import parse_keys


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["doctor", "--modl-repository=x"], "--model-repository"),
        (["explain", "m", "--jsn"], "--json"),
        (["config", "m", "--model-config-nam", "x"], "--model-config-name"),
        (["demo", "--onc"], "--once"),
        (["key", "ci", "read", "--fil", "x"], "--file"),
        (["perf", "compare", "a", "b", "--treshold", "3"], "--threshold"),
    ],
)
def test_an_unknown_option_names_the_nearest(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2

    assert f"(hint: did you mean {meant}?)\n" in capsys.readouterr().err


def test_an_argument_that_resembles_nothing_is_only_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "xyzzy"]) == 2

    assert capsys.readouterr().err.startswith("charonia demo: unexpected argument 'xyzzy'\n")


def test_a_missing_argument_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "ci"]) == 2

    assert capsys.readouterr().err.startswith("charonia key: expected SCOPES, got none\n")


def test_a_header_without_a_value_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "m", "-H", "no header"]) == 2

    assert capsys.readouterr().err.startswith("charonia explain: --header: expected Name:Value, got 'no header'\n")


def test_the_help_of_a_small_command_names_its_arguments_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--help"]) == 0

    printed = capsys.readouterr().out
    assert "-m, --model MODEL" in printed
    assert "  -u, --url URL  " in printed
    assert "(default: localhost:8000)" in printed


def test_a_name_has_one_key_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    assert main(["key", "ci", "read", "--file", str(path)]) == 0
    before = path.read_text()

    assert main(["key", "ci", "admin", "--file", str(path)]) == 1

    captured = capsys.readouterr()
    assert (
        f"charonia key: '{path}' has a key of 'ci' already (hint: to have two while clients change over" in captured.err
    )
    assert path.read_text() == before
    assert len(captured.out.split()) == 1  # the key of the first call
    assert main(["key", "b", "infer", "--file", str(path), "--requests-per-min=5", "--tokens-per-min=700"]) == 0
    assert [each[3:] for each in parse_keys(path.read_text()).keys] == [(1, 0, 0), (1, 5, 700)]
