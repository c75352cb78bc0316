"""Upgrades that are refused before an engine is started."""

import asyncio
import os
from pathlib import Path

import pytest

from charonia.core.errors import Code, ServingError
from charonia.server.front_ends import upgrades
from charonia.server.front_ends.upgrades import Upgrades, Wanted
from charonia.server.guard.notify import Notifier
from charonia.server.options import ServerOptions


class Guard:
    """A guard with an engine that is this process."""

    def __init__(self, *, may_upgrade: bool) -> None:
        self.may_upgrade = may_upgrade

    def pid(self) -> int:
        """Return the number of the engine."""
        return os.getpid()


def refusal(folder: Path, *, may_upgrade: bool) -> ServingError:
    made = Upgrades(folder, ServerOptions(), (), Notifier())
    made.guard = Guard(may_upgrade=may_upgrade)  # type: ignore[assignment]
    with pytest.raises(ServingError) as refused:
        asyncio.run(made._run(Wanted(), lambda _: None))
    assert list(folder.iterdir()) == []
    assert refused.value.code is Code.UNAVAILABLE
    return refused.value


def test_one_that_does_not_fit_into_memory_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrades, "available_memory", lambda: 5 * 2**20)

    error = refusal(tmp_path, may_upgrade=True)

    assert "two engines do not fit into memory" in error.message
    assert "5 MiB are available" in error.message
    assert "--stop-first" in error.hint


def test_one_while_another_is_under_way_is_refused(tmp_path: Path) -> None:
    assert "another upgrade is under way" in refusal(tmp_path, may_upgrade=False).message
