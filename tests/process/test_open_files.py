"""The server may open as many files as the system's hard limit allows."""

import resource
from pathlib import Path

import psutil
from tests.support.process import ServeProcess


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        with ServeProcess(tmp_path) as server:
            assert psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
