"""`charonia traffic`: what the options ask for, and how the answer is shown. The command itself: tests/process."""

from typing import Any

import pytest

from charonia.cli.traffic import LINE, change_of, run, traffic_text
from charonia.core.errors import ServingError


def change(*arguments: str) -> dict[str, object]:
    return change_of(LINE.parse(arguments))


def test_options_become_the_change_that_servers_take() -> None:
    assert change("set", "m", "--weights", "1=90,2=10") == {"weights": {"1": 90.0, "2": 10.0}}
    assert change("set", "m", "--weights", "", "--sticky", "", "--shadow", "3=0.5") == {
        "weights": {},
        "sticky": "",
        "shadow": {"3": 0.5},
    }
    assert change("pause", "m") == {"action": "pause"}
    assert change("canary", "m", "--canary-version", "2") == {"canary": {"version": "2"}}
    assert change("canary", "m", "--canary-version=2", "--steps=5,100", "--p99-ratio-max=any", "--shadow=2=0.1") == {
        "shadow": {"2": 0.1},
        "canary": {"version": "2", "steps": (5.0, 100.0), "p99_ratio_max": None},
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("begin", "m"), "ACTION: expected one of status, set, canary"),
        (("set", "m", "--weights", "1"), "--weights: expected VERSION=NUMBER, separated by commas, got '1'"),
        (("canary", "m", "--steps", "1,x"), "--steps: expected a number above 0, got 'x'"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ServingError) as wrong:
        LINE.parse(arguments)

    assert says in str(wrong.value)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ServingError, match="set: expected --weights, --sticky or --shadow, got none"):
        change("set", "m")
    with pytest.raises(ServingError, match="canary: expected --canary-version, got none"):
        change("canary", "m")


def test_without_a_server_the_command_fails_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "m", "-u", "127.0.0.1:9"]) == 1
    assert "charonia traffic: " in capsys.readouterr().err


def test_the_answer_is_a_table_with_the_canary_and_the_history() -> None:
    figures = {"weight": 0, "in_flight": 1, "errors": 2, "requests": 30, "latency_us": {"p50": 1500.0, "p99": 20_000.0}}
    shadow = {"difference_rate": 0.125, "compared": 8, "dropped": 3, "latency_us": {"p99": 2_500.0}}
    document: dict[str, Any] = {
        "model": "m",
        "source": "request",
        "sticky": "key",
        "versions": [
            {**figures, "version": "1", "is_ready": True, "share": 0.9, "shadow": None},
            {**figures, "version": "2", "is_ready": False, "share": 0.1, "shadow": shadow, "latency_us": {}},
        ],
        "canary": {
            "plan": {"version": 2, "stable": 1},
            "state": "rolled_back",
            "reason": "rolled back at 10 %",
            "waits_for": "",
            "checks": {"errors": "2 of 30"},
        },
        "history": [{"time": "2026-11-23T22:48:35Z", "text": f"step {number}"} for number in range(30)],
    }

    lines = traffic_text(document).splitlines()

    assert lines[0] == "m: set by request, sticky by key"
    assert lines[3].split() == ["1", "yes", "90.0%", "30", "2", "1", "1.5", "20", "-"]
    assert lines[4].endswith("12.50% of 8 differ, 3 dropped, p99 2.5 ms")
    assert "canary of version 2 against version 1: rolled back" in lines
    assert "  2 of 30" in lines
    assert lines[-1] == "  2026-11-23T22:48:35Z  step 29"
    assert sum("step" in line for line in lines) == 20
