"""The platform's demo as a user runs it."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(1000)


def command(data: Path) -> list[str]:
    return [sys.executable, "-m", "examples.platform.demo", "--once", f"--data={data}"]


def processes_of(data: Path) -> list[list[str]]:
    """Return the command lines that name a folder: the platform, its servers, what they have started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(data) in argument for argument in process.cmdline()):
                found.append(process.cmdline())
    return found


def test_the_story_is_told_and_nothing_is_left_running(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "tune-job.yaml  yaml" in done.stdout
    assert "7 lines of text" in done.stdout
    assert "version 2 gets 10 % of the requests, version 1 the rest" in done.stdout
    assert "version 2 gets all requests" in done.stdout or "rolled back" in done.stdout  # on a busy machine
    assert re.search(r"revision \d serves .*\n    \d+ requests answered \(\d+ by version 1\), 0 errors\n$", done.stdout)
    assert done.stdout.count(" 0 errors") == 3, done.stdout
    assert processes_of(tmp_path) == []
    assert not list(tmp_path.glob("deployments/*/*"))


def test_ctrl_c_ends_all_that_it_has_started(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        next(line for line in lines if line.startswith("== Two models"))
        assert processes_of(tmp_path)
        process.send_signal(signal.SIGINT)
        rest = lines.read()

    assert process.wait(60) == 0
    assert "Stopping." in rest
    assert processes_of(tmp_path) == []
