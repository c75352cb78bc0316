"""The story of the platform, told by Chromium."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.examples.test_platform_demo import processes_of
from tests.support import browser

pytestmark = [browser.needed, pytest.mark.timeout(1000)]


def test_the_story_is_told_and_nothing_is_left_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.platform.story", "--installed-packages"]
    done = subprocess.run([*command, f"--data={tmp_path}"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        r"reads 5 lines, the first: Region",
        r"version 1 answers 200: 0\.\d\d\n +the webhook answers 202",
        r"requests to version 1, \d+ to version 2",
        r"request \d+ of key 'batch': 429, Retry-After \d+, API key 'batch' has used its limit of 30 requests a minute",
        r"received: Deployment 'similar': [0-9.]+ % of the requests fail \(limit 5 %\)\n +received: resolved; \d+ ",
    ):
        assert re.search(line, done.stdout), done.stdout
    assert processes_of(tmp_path) == []
