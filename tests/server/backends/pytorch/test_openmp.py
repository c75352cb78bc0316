"""The threads that compute one operator together."""

import asyncio
import os
from pathlib import Path

import pytest
import torch
from tests.support.process import eventually

from charonia.server.backends.pytorch.openmp import in_passing_thread, spinning_while_waiting


def threads_of_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def compute() -> int:
    torch.set_num_threads(4)
    torch.randn(512, 512) @ torch.randn(512, 512)
    torch.randn(1_000_000).exp_()
    return threads_of_process()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_a_model_that_was_loaded_leaves_no_team_of_threads_behind() -> None:
    before = threads_of_process()

    during = asyncio.run(in_passing_thread(compute))

    assert during >= before + 3
    assert eventually(lambda: threads_of_process() <= during - 3)


def test_what_goes_wrong_in_the_passing_thread_is_raised() -> None:
    def fail() -> None:
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        asyncio.run(in_passing_thread(fail))


def test_waiting_is_set_only_while_the_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)

    with spinning_while_waiting():
        within = os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]

    assert within == ("ACTIVE", "300000")
    assert "OMP_WAIT_POLICY" not in os.environ
    assert "GOMP_SPINCOUNT" not in os.environ


def test_what_the_environment_says_of_waiting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")

    with spinning_while_waiting():
        assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
        assert "GOMP_SPINCOUNT" not in os.environ

    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
