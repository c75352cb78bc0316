"""Commands that the kernel kills together with the process that started them."""

import subprocess
import sys

import psutil
import pytest
from tests.support.process import wait_until_ended

from charonia.die_with_parent import with_parent_death_signal

STARTER = """\
import signal, subprocess, sys
from tests.support.process import wait_until_ended
from charonia.die_with_parent import with_parent_death_signal
program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
command = with_parent_death_signal([sys.executable, "-c", program])
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the parent death signal")


def test_the_program_is_the_process_that_was_started_and_its_status_is_kept() -> None:
    command = with_parent_death_signal(["sh", "-c", "echo $$; exit 3"])

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=200)

    assert (process.returncode, output) == (3, f"{process.pid}\n")


def test_a_program_that_ignores_sigterm_is_killed_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        child = psutil.Process(int(starter.stdout.readline()))
        starter.kill()

        wait_until_ended(child)


def test_a_program_whose_starter_is_gone_already_does_not_begin() -> None:
    command = with_parent_death_signal(["echo", "begun"])
    of_another_starter = [*command[:5], "1" if command[5] != "1" else "2", *command[6:]]

    finished = subprocess.run(of_another_starter, capture_output=True, text=True, timeout=200, check=False)

    assert finished.stdout == ""
