"""The timer of queue delays, with the system's timer and without one."""

import asyncio
import sys

import pytest

from charonia.clock import WakeTimer, now_ns


@pytest.mark.parametrize("has_timerfd", [True, False], ids=["timerfd", "a system without timerfd"])
async def test_it_calls_back_once_not_before_its_time(has_timerfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_timerfd:
        monkeypatch.setattr(sys, "platform", "darwin")
    elif sys.platform != "linux":
        pytest.skip("only Linux has timerfd")
    came: list[int] = []
    woken = asyncio.Event()

    def wake() -> None:
        came.append(now_ns())
        woken.set()

    timer = WakeTimer(asyncio.get_running_loop(), wake)
    at_ns = now_ns() + 2_000_000

    timer.set(now_ns() + 3_600_000_000_000)
    timer.set(at_ns)
    await woken.wait()
    timer.set(now_ns())
    timer.set(None)
    timer.close()
    timer.close()
    await asyncio.sleep(0)

    assert len(came) == 1
    assert came[0] >= at_ns - 1_000_000  # the loop's timer has a resolution of a millisecond
