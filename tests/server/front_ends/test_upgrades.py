"""Upgrades that end before an engine is started."""

import asyncio
import os
from pathlib import Path

import pytest

from charonia.core.errors import Code, ServingError
from charonia.server.front_ends import processes
from charonia.server.front_ends.processes import UpgradeRequest, Upgrades
from charonia.server.guard.control import Message
from charonia.server.guard.notify import Notifier
from charonia.server.options import ServerOptions


class Guard:
    def __init__(self, *, may_upgrade: bool) -> None:
        self.may_upgrade = may_upgrade

    def pid(self) -> int:
        return os.getpid()


def refusal(folder: Path, *, may_upgrade: bool) -> ServingError:
    made = Upgrades(folder, ServerOptions(), (), Notifier(), {})
    made.guard = Guard(may_upgrade=may_upgrade)  # type: ignore[assignment]
    with pytest.raises(ServingError) as refused:
        asyncio.run(made._run(UpgradeRequest(), lambda _: None))
    assert list(folder.iterdir()) == []
    assert refused.value.code is Code.UNAVAILABLE
    return refused.value


def test_one_that_does_not_fit_into_memory_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "available_memory", lambda: 5 * 2**20)

    error = refusal(tmp_path, may_upgrade=True)

    assert "two engines do not fit into memory" in error.message
    assert "5 MiB are available" in error.message
    assert "--stop-first" in error.hint


def test_one_while_another_is_under_way_is_refused(tmp_path: Path) -> None:
    assert "another upgrade is under way" in refusal(tmp_path, may_upgrade=False).message


def test_one_that_cannot_write_its_files_says_so_and_does_not_keep_the_command_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Upgrades(tmp_path / "gone", ServerOptions(), (), Notifier(), {})
    made.guard = Guard(may_upgrade=True)  # type: ignore[assignment]

    async def answers() -> list[Message]:
        async with asyncio.timeout(200):
            return [message async for message in made.answer({})]

    *_, last = asyncio.run(answers())

    assert "No such file or directory" in str(last["error"])
    assert "it cannot continue" in caplog.text
