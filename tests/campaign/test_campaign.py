"""The campaign itself, in short: its parts run, and each of its checks notices what is wrong."""

import pytest
from fuzz import guided
from tests.campaign import __main__ as campaign
from tests.campaign import fuzzed


@pytest.mark.parametrize(
    "parts",
    [
        ["checker, one process"],
        ["checker, front ends"],
        ["checker, killed"],
        ["checker, workers killed"],
        ["volume"],
        ["roles"],
        [f"fuzzed {name}" for name in fuzzed.FUZZERS],
    ],
    ids=lambda parts: parts[0].replace(",", ""),
)
def test_a_short_run_finds_nothing(parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    requests = 60 if parts[0] in ("checker, one process", "checker, front ends") else 1_000
    status = campaign.main(["--parts", *parts, f"--requests={requests}", "--cases=300", "--volume=64", "--seconds=0"])

    printed = capsys.readouterr().out
    assert status == 0, printed
    assert all(part in printed for part in parts)


def test_browsers_ask_every_listener_and_only_pages_of_other_sites_get_403(capsys: pytest.CaptureFixture[str]) -> None:
    status = campaign.main(["--parts", "browsers", "--requests=400"])

    printed = capsys.readouterr().out
    assert status == 0, printed
    listeners = ["one process", "front ends", "platform"]
    listeners += [f"one process, {name}" for name in ("metrics", "gRPC", "Sagemaker", "Vertex AI")]
    listeners += [f"front ends, {name}" for name in ("metrics", "gRPC", "replica")]
    assert [name for name in listeners if f"00 requests to {name}" not in printed] == []


@pytest.mark.parametrize("name", guided.TARGETS)
def test_saved_inputs_are_read_or_refused(name: str) -> None:
    paths = list(guided.saved(name))

    for path in paths:
        guided.replay(name, path.read_bytes())

    assert paths
