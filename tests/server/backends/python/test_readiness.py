"""Questions to a model whether it is ready: one at a time, with a limit, and its words in the log."""

import asyncio

import pytest

from charonia.server.backends.workers import services as services_module
from charonia.server.backends.workers.services import Readiness


def made() -> tuple[Readiness, list[int]]:
    sent: list[int] = []
    return Readiness("m_0", sent.append), sent


async def ask(readiness: Readiness) -> asyncio.Task[bool]:
    asking = asyncio.ensure_future(readiness.ask())
    await asyncio.sleep(0)
    return asking


async def test_all_who_ask_at_a_time_share_one_question() -> None:
    readiness, sent = made()
    first, second = await ask(readiness), await ask(readiness)
    assert sent == [1]
    readiness.answered(1, True)
    assert (await first, await second) == (True, True)

    third = await ask(readiness)
    assert sent == [1, 2]
    readiness.answered(1, True)  # of the past
    assert not third.done()
    readiness.answered(2, False)
    assert not await third


async def test_a_model_that_has_ended_is_not_ready() -> None:
    readiness, _ = made()
    asking = await ask(readiness)
    readiness.gone()
    assert not await asking
    readiness.gone()


async def test_who_stops_waiting_leaves_the_answer_to_the_others() -> None:
    readiness, _ = made()
    leaves, stays = await ask(readiness), await ask(readiness)
    leaves.cancel()
    readiness.answered(1, True)
    assert await stays


async def test_a_model_that_does_not_answer_in_time_is_not_ready_and_not_asked_again_before_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(services_module, "IS_READY_S_MAX", 0.02)

    readiness, sent = made()
    assert not await readiness.ask()
    assert not await readiness.ask()
    assert sent == [1]
    readiness.answered(1, True)
    asking = await ask(readiness)
    readiness.answered(2, True)
    assert await asking

    assert [record.message for record in caplog.records] == ["is_ready of 'm_0': it has not answered within 0.02 s"]


async def test_why_a_model_does_not_say_is_logged_until_it_says_something_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    readiness, _ = made()
    said: list[bool | str] = ["ValueError: no database", "ValueError: no database", True, "ValueError: no database"]
    for number, answer in enumerate(said, 1):
        asking = await ask(readiness)
        readiness.answered(number, answer)
        assert await asking is (answer is True)

    assert [record.message for record in caplog.records] == ["is_ready of 'm_0': ValueError: no database"] * 2
