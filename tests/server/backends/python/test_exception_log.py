"""The log of exceptions: how many, and what it says of the others."""

import asyncio

import pytest

from charonia.core.request import CallFrame
from charonia.server.backends.workers import services
from charonia.server.backends.workers.services import EXCEPTIONS_MAX, ExceptionLog

MODEL = CallFrame("m", "3")


async def test_more_exceptions_than_a_reader_can_use_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "WINDOW_S", 0)

    log = ExceptionLog()
    for _ in range(EXCEPTIONS_MAX + 5):
        log.note(MODEL, "m_0_0", ["a"], "ValueError: pity")
    assert log.suppressed == 5
    while log.suppressed:
        await asyncio.sleep(0)
    log.note(MODEL, "m_0_0", ["a"], "ValueError: again")
    lines = caplog.messages
    assert len(lines) == EXCEPTIONS_MAX + 2
    assert lines[-2] == "model 'm' version 3: 5 more exceptions within 0 s were not logged"
    assert lines[-1].endswith("ValueError: again")


async def test_the_ids_of_a_large_batch_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    ExceptionLog().note(MODEL, "m_0_0", ["", *"abcdefghi"], "ValueError: pity")
    assert "request <id_unknown>, 'a', 'b', 'c', 'd', 'e', 'f', 'g' and 2 more: execute" in caplog.text
