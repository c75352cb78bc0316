"""A process polls only if no neighbour needs the core."""

import asyncio
from pathlib import Path

import pytest

from charonia import busy_poll
from charonia.busy_poll import ALONE_MIN, AWAKE_NS, BusyPoll, SiblingProcesses, has_spare_core_now

NOW = 10**12


@pytest.mark.parametrize(
    ("latest_ns", "cores", "leaves"),
    [
        ([], 1, False),
        ([], 2, True),
        ([0, 0, 0], 2, True),  # neighbours that never had a request
        ([NOW - AWAKE_NS - 1], 2, True),  # one that sleeps
        ([NOW - AWAKE_NS], 2, False),
        ([NOW], 3, True),
        ([NOW, NOW, 0], 3, False),
        ([NOW, NOW, NOW], 5, True),
    ],
)
def test_each_neighbour_with_requests_needs_a_core(latest_ns: list[int], cores: int, *, leaves: bool) -> None:
    assert has_spare_core_now(latest_ns, NOW, cores) is leaves


def test_processes_know_each_other_and_not_themselves(tmp_path: Path) -> None:
    first, second, third = (SiblingProcesses(tmp_path, number, 3, cores=2) for number in range(3))

    assert first.has_spare_core(NOW)
    first.record_request(NOW)

    assert first.has_spare_core(NOW)
    assert not second.has_spare_core(NOW)
    assert not third.has_spare_core(NOW + AWAKE_NS)
    assert second.has_spare_core(NOW + AWAKE_NS + 1)


def test_a_process_that_is_started_again_finds_what_it_had_noted(tmp_path: Path) -> None:
    SiblingProcesses(tmp_path, 1, 2, cores=2).record_request(NOW)
    SiblingProcesses(tmp_path, 1, 2, cores=2)

    assert not SiblingProcesses(tmp_path, 0, 2, cores=2).has_spare_core(NOW)


async def test_a_lone_caller_keeps_a_process_awake_until_a_neighbour_has_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy_poll, "now_ns", lambda: NOW)

    loop = asyncio.get_running_loop()
    one = BusyPoll(loop, 10**9, SiblingProcesses(tmp_path, 0, 2, cores=2))
    other = BusyPoll(loop, 10**9, SiblingProcesses(tmp_path, 1, 2, cores=2))
    for _ in range(ALONE_MIN + 1):
        one.ran_at_once(NOW)
        await asyncio.sleep(0)
    assert one.worker_ns == 10**9

    for _ in range(ALONE_MIN + 1):
        other.ran_at_once(NOW)
        await asyncio.sleep(0)

    assert one.worker_ns == other.worker_ns == 0
