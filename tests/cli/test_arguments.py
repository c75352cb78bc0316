import pytest

from charonia.cli.main import main


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
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"(hint: did you mean {meant}?)\n")


def test_an_argument_that_resembles_nothing_is_only_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "xyzzy"])

    assert capsys.readouterr().err.endswith("unrecognized arguments: xyzzy\n")
