"""The platform's demo."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from examples.platform import demo

pytestmark = pytest.mark.timeout(1000)


def processes_of(data: Path) -> list[list[str]]:
    """Return the command lines that name a folder: the platform, its servers, what they have started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(data) in argument for argument in process.cmdline()):
                found.append(process.cmdline())
    return found


def test_the_story_is_told_and_nothing_is_left_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.run(tmp_path, once=True)

    told = capsys.readouterr().out
    assert "tune-job.yaml  yaml" in told
    assert "7 lines of text" in told
    assert "version 2 gets 10 % of the requests, version 1 the rest" in told
    assert "version 2 gets all requests" in told or "rolled back" in told  # on a busy machine
    assert re.search(r"revision \d serves .*\n    \d+ requests answered \(\d+ by version 1\), 0 errors\n$", told)
    assert told.count(" 0 errors") == 3, told
    assert processes_of(tmp_path) == []
    assert not list(tmp_path.glob("deployments/*/*"))


def test_ctrl_c_ends_all_that_it_has_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.platform.demo", "--once", f"--data={tmp_path}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        next(line for line in lines if line.startswith("== Two models"))
        assert processes_of(tmp_path)
        process.send_signal(signal.SIGINT)
        rest = lines.read()

    assert process.wait(200) == 0
    assert "Stopping." in rest
    assert processes_of(tmp_path) == []
