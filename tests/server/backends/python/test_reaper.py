"""The process that ends process groups when the one it stands beside has ended."""

import os
import subprocess
import sys

import psutil
from tests.support.process import eventually

from charonia.server.backends.workers import reaper as reaper_module
from charonia.server.backends.workers.reaper import Reaper


def group() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "60"], start_new_session=True)


def run(lines: str) -> None:
    subprocess.run([sys.executable, "-I", "-S", reaper_module.__file__], input=lines.encode(), check=True, timeout=200)


def test_at_the_end_of_its_input_it_kills_the_groups_that_are_left() -> None:
    with group() as left, group() as ended:
        run(f"+{left.pid}\n+{ended.pid}\n-{ended.pid}\n+999999999\n")

        assert eventually(lambda: left.poll() is not None)
        assert ended.poll() is None
        ended.kill()


def test_one_that_was_killed_is_replaced_and_told_everything_again() -> None:
    reaper = Reaper()
    with group() as first, group() as second:
        reaper.watch(first.pid)
        killed = psutil.Process(reaper._pid)
        killed.kill()
        killed.wait(200)

        reaper.watch(second.pid)

        assert reaper._pid != killed.pid
        os.close(reaper._pipe)
        assert eventually(lambda: None not in (first.poll(), second.poll()))
        os.waitpid(reaper._pid, 0)


def test_it_ends_when_there_is_nothing_left_to_watch() -> None:
    reaper = Reaper()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as watched:
        reaper.watch(watched.pid)
        assert reaper.end() == 0  # not while it has something to watch

        reaper.unregister(watched.pid)
        watched.kill()

    pid = reaper.end()
    assert os.waitpid(pid, 0) == (pid, 0)
    assert reaper.end() == 0
