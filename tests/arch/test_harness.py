"""What tests/conftest.py and the configuration of pytest promise: no test hangs, no exception gets lost."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.support import warm_start

from charonia.die_with_parent import with_parent_death_signal
from charonia.platform.isolation.isolation import Isolation, SandboxAccess
from charonia.platform.targets.local_server import ServerFolder
from charonia.python_command import python_module

ROOT = Path(__file__).parents[2]
TESTS = """
import asyncio
import threading

import pytest
import uvloop

loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


def wait_for_ever(new_loop, callback=lambda: None):
    async def main():
        asyncio.get_running_loop().call_soon(callback)
        await asyncio.get_running_loop().create_future()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@loops
def test_callback(new_loop):
    wait_for_ever(new_loop, lambda: 1 / 0)


@loops
def test_task(new_loop):
    async def fail():
        raise OSError("lost")

    async def main():
        asyncio.create_task(fail())
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@loops
@pytest.mark.timeout(1)
def test_hang(new_loop):
    wait_for_ever(new_loop)


@loops
@pytest.mark.loop_faults
def test_on_purpose(new_loop):
    async def main():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


def test_finalizer():
    class Broken:
        def __del__(self):
            raise OSError("lost")

    Broken()
"""


def test_what_hangs_or_loses_an_exception_fails_by_name(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_them.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", ".", "-rfEp"]

    environment = os.environ | {"PYTHONPATH": str(ROOT)}  # for `tests.support`
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "."], cwd=tmp_path, env=environment, capture_output=True, text=True
    )

    outcomes = {
        name: outcome for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) .*::(\S+)", done.stdout, re.MULTILINE)
    }
    assert outcomes == {
        "test_callback[asyncio]": "FAILED",
        "test_callback[uvloop]": "FAILED",
        "test_task[asyncio]": "FAILED",
        "test_task[uvloop]": "FAILED",
        "test_hang[asyncio]": "FAILED",
        "test_hang[uvloop]": "FAILED",
        "test_on_purpose[asyncio]": "PASSED",
        "test_on_purpose[uvloop]": "PASSED",
        "test_thread": "FAILED",
        "test_finalizer": "FAILED",
    }
    assert done.stdout.count("ZeroDivisionError: division by zero") >= 2
    assert done.stdout.count("Timeout (>1.0s) from pytest-timeout") >= 2


def test_a_program_that_dies_with_its_starter_starts_warm_too() -> None:
    program = ["-m", "charonia.tools.perf.worker", "1"]
    command = [sys.executable, "-P", *program]

    assert warm_start.recognised(command) == (program, [])
    assert warm_start.recognised(with_parent_death_signal(command)) == (program, [("die", str(os.getpid()))])


def test_a_command_that_the_platform_confines_starts_warm_in_its_wrappers(tmp_path: Path) -> None:
    isolation, command = Isolation(tmp_path, mode="available"), python_module("charonia", "serve")
    with isolation.room() as room, patch("subprocess.run") as run:
        ServerFolder(tmp_path).start(isolation.command(command, room, SandboxAccess()), {})

    program, steps = warm_start.recognised(run.call_args.args[0])

    assert program == command[2:]
    assert [kind for kind, _ in steps] == ["detach", "note", "confine"]


def test_every_test_has_a_time_limit(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("timeout")) == 300
    assert pytestconfig.getini("faulthandler_exit_on_timeout") is True
