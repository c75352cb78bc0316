"""Why a server has not started, from what was said."""

import pytest

from charonia.platform.targets.local_server import last_log_line, why_ended, why_not_upgraded

LOG = """\
I1124 00:09:35.500744 29763 lifecycle.py:404] "loading: plus:1"
E1124 00:09:35.653999 29763 load_errors.py:54] "load failed for model 'plus': cannot load it (hint: it is no file)"
E1124 00:09:36.073412 29739 supervisor.py:278] "engine (pid 29763) ended after 2.1 s: exit status 1"
I1124 00:09:36.084812 29739 serve.py:423] "server stopped: not every model could be loaded"
"""

STEPS = """\
server 4711: release 0.1.0
a new engine starts
charonia upgrade: the new engine cannot start: not every model could be loaded:
charonia upgrade: load failed for model 'code': no module 'a'
charonia upgrade:
charonia upgrade: At: model.py(1) (hint: the previous engine continues to serve; the server's log has the details)
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (LOG, "load failed for model 'plus': cannot load it (hint: it is no file)"),
        ("charonia serve: --port: port 9000 is in use\n", "--port: port 9000 is in use"),
        ("/usr/bin/python: No module named charonia\n", "/usr/bin/python: No module named charonia"),
        ("", "the server has ended without a word"),
    ],
)
def test_a_server_that_has_ended_says_why_in_its_log(log: str, reason: str) -> None:
    assert why_ended(log) == reason


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (STEPS, "not every model could be loaded:\nload failed for model 'code': no module 'a'\nAt: model.py(1)"),
        ("a new engine starts\n", "a new engine starts"),
        ("", "the upgrade was cut off"),
    ],
)
def test_an_upgrade_that_has_failed_says_why(steps: str, reason: str) -> None:
    assert why_not_upgraded(steps) == reason


def test_the_last_line_of_a_log_is_what_it_says() -> None:
    assert last_log_line(LOG) == "server stopped: not every model could be loaded"
    assert last_log_line('E1124 01:56:31.612597 27149 a.py:4] "2 problems') == "2 problems"
    assert last_log_line("the files are fetched") == "the files are fetched"
