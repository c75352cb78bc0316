"""The memory of processes and their descendants."""

import os
import subprocess
import sys

import psutil
import pytest

from charonia.server.machine.memory import memory_of

HOLDS = "import sys, mmap; block = bytearray(80 << 20); print('held', flush=True); sys.stdin.read()"
FORKS = f"import os; os.fork() and os.wait() or exec({HOLDS!r})"


@pytest.mark.parametrize("program", [HOLDS, FORKS])
@pytest.mark.parametrize("limit", [0, 2**40])
def test_it_counts_descendants(program: str, limit: int) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        sizes = memory_of([process.pid, os.getpid()], limit)
        assert process.stdin is not None
        process.stdin.close()

    assert sizes[process.pid] >= 80 << 20
    assert sizes[os.getpid()] >= 80 << 20


def test_pages_that_processes_share_count_once_when_it_matters() -> None:
    forks = "import os, sys; block = bytearray(80 << 20)\npid = os.fork()\nif not pid: print('held', flush=True)\n"
    forks += "sys.stdin.read()\nif pid: os.wait()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", forks], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        resident, shared_out = (memory_of([process.pid], limit)[process.pid] for limit in (2**40, 0))
        assert process.stdin is not None
        process.stdin.close()

    assert shared_out < 140 << 20 < resident


def test_a_process_that_has_ended_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()

    assert not psutil.pid_exists(process.pid)
    assert memory_of([process.pid], 0) == {process.pid: 0}
