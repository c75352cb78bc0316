from pathlib import Path

import pytest

from charonia.cli.main import main
from charonia.server.access.rules import parse_keys


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["doctor", "--modl-repository=x"], "(hint: did you mean --model-repository?)\n"),
        (["explain", "m", "--jsn"], "(hint: did you mean --json?)\n"),
        (["config", "m", "--model-config-nam", "x"], "(hint: did you mean --model-config-name?)\n"),
        (["demo", "--onc"], "(hint: did you mean --once?)\n"),
        (["key", "ci", "read", "--fil", "x"], "(hint: did you mean --file?)\n"),
        (["perf", "compare", "a", "b", "--treshold", "3"], "(hint: did you mean --threshold?)\n"),
        (["demo", "xyzzy"], "charonia demo: unexpected argument 'xyzzy'\n"),
        (["key", "ci"], "charonia key: expected SCOPES, got none\n"),
        (["upgrade", "--pid", "abc"], "charonia upgrade: --pid: expected an integer from 1 to "),
        (["traffic", "canary", "m", "--step-seconds", "1m"], "charonia traffic: --step-seconds: expected a number"),
        (["explain", "m", "-H", "no header"], "charonia explain: --header: expected Name:Value, got 'no header'\n"),
    ],
)
def test_misuse_is_named_with_the_nearest_option(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2

    assert said in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("name", "scopes", "problem"),
    [
        ("a b", "infer", "expected NAME SCOPES KEY, got 4 words"),
        ("", "infer", "expected NAME SCOPES KEY, got 2 words"),
        ("ci", "foo", "key 'ci': expected scopes of infer, read, admin, got 'foo'"),
        ("#ci", "infer", "expected a NAME without '#', and one line"),
        ("ci", f"infer {'k' * 16}\nops admin", "expected a NAME without '#', and one line"),
    ],
)
def test_a_key_whose_line_a_server_would_refuse_is_not_created(
    name: str, scopes: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"

    assert main(["key", name, scopes, "--file", str(path)]) == 2

    assert capsys.readouterr() == ("", f"charonia key: {problem}\n")
    assert not path.exists()
