"""The story of the platform, told by Chromium."""

import re
from pathlib import Path

import pytest
from examples.platform import story
from tests.examples.test_platform_demo import processes_of
from tests.support import browser

pytestmark = [browser.needed, pytest.mark.timeout(1000)]


def test_the_story_is_told_and_nothing_is_left_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story.run(tmp_path, None, installed_packages=True)

    told = capsys.readouterr().out
    for line in (
        r"reads 5 lines, the first: Region",
        r"version 1 answers 200: 0\.\d\d\n +the webhook answers 202",
        r"requests to version 1, \d+ to version 2",
        r"request \d+ of key 'batch': 429, Retry-After \d+, API key 'batch' has used its limit of 30 requests a minute",
        r"received: Deployment 'similar': [0-9.]+ % of the requests fail \(limit 5 %\)\n +received: resolved; \d+ ",
    ):
        assert re.search(line, told), told
    assert processes_of(tmp_path) == []
