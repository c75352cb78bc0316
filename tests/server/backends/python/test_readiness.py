"""Questions to a model whether it is ready: one at a time, with a limit, and its words in the log."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from charonia.server.backends.workers import services as services_module
from charonia.server.backends.workers.services import Readiness


def run(scenario: Callable[[Readiness, list[int]], Coroutine[object, object, None]]) -> None:
    async def main() -> None:
        sent: list[int] = []
        await scenario(Readiness("m_0", sent.append), sent)

    asyncio.run(asyncio.wait_for(main(), 10))


async def ask(readiness: Readiness) -> asyncio.Task[bool]:
    asking = asyncio.ensure_future(readiness.ask())
    await asyncio.sleep(0)
    return asking


def test_all_who_ask_at_a_time_share_one_question() -> None:
    async def scenario(readiness: Readiness, sent: list[int]) -> None:
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

    run(scenario)


def test_a_model_that_has_ended_is_not_ready() -> None:
    async def scenario(readiness: Readiness, sent: list[int]) -> None:
        asking = await ask(readiness)
        readiness.gone()
        assert not await asking
        readiness.gone()

    run(scenario)


def test_who_stops_waiting_leaves_the_answer_to_the_others() -> None:
    async def scenario(readiness: Readiness, sent: list[int]) -> None:
        leaves, stays = await ask(readiness), await ask(readiness)
        leaves.cancel()
        readiness.answered(1, True)
        assert await stays

    run(scenario)


def test_a_model_that_does_not_answer_in_time_is_not_ready_and_not_asked_again_before_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(services_module, "IS_READY_S_MAX", 0.02)

    async def scenario(readiness: Readiness, sent: list[int]) -> None:
        assert not await readiness.ask()
        assert not await readiness.ask()
        assert sent == [1]
        readiness.answered(1, True)
        asking = await ask(readiness)
        readiness.answered(2, True)
        assert await asking

    run(scenario)

    assert [record.message for record in caplog.records] == ["is_ready of 'm_0': it has not answered within 0.02 s"]


def test_why_a_model_does_not_say_is_logged_until_it_says_something_else(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(readiness: Readiness, sent: list[int]) -> None:
        said: list[bool | str] = ["ValueError: no database", "ValueError: no database", True, "ValueError: no database"]
        for number, answer in enumerate(said, 1):
            asking = await ask(readiness)
            readiness.answered(number, answer)
            assert await asking is (answer is True)

    run(scenario)

    assert [record.message for record in caplog.records] == ["is_ready of 'm_0': ValueError: no database"] * 2
