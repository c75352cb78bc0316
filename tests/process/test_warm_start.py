"""A program that is forked from a warm process finds itself as if an interpreter had been started for it."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support import warm_start
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import ServeProcess
from tests.support.python_model import load

LOOKS_AROUND = """
import json, multiprocessing, os, random, resource, signal, sys, threading
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        descriptors = {}
        for number in os.listdir("/proc/self/fd"):
            try:
                descriptors[number] = os.readlink(f"/proc/self/fd/{number}").partition(":")[0]
            except FileNotFoundError:  # that of the list itself
                pass
        main = sys.modules["__main__"]
        seen = {
            "affinity": sorted(os.sched_getaffinity(0)),
            "arguments": sys.argv,
            "command line": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")[:2],
            "descriptors": sorted(descriptors.values()),
            "streams": [descriptors.get(str(number)) for number in range(3)],
            "environment": {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")},
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "folder": os.getcwd(),
            "leads its session": os.getsid(0) == os.getpid() == os.getpgid(0),
            "main": [main.__name__, main.__file__, main.__spec__],
            "multiprocessing": [multiprocessing.current_process().name, multiprocessing.parent_process()],
            "parent": os.getppid(),
            "path": sys.path,
            "signals": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
            # Without the two signals that the C library has for itself.
            "ignored": [
                int(line.split()[1], 16) & ~(3 << 31)
                for line in open("/proc/self/status") if line.startswith(("SigIgn", "SigBlk"))
            ],
            "tests": sorted(name for name in sys.modules if name.split(".")[0] in ("pytest", "tests")),
            "threads": threading.active_count(),
            "unbuffered": [sys.stdout.write_through, sys.stdout.encoding, sys.stderr.errors],
        }
        drawn = [random.random(), float(np.random.random())]
        with open(os.path.join(args["model_repository"], "seen"), "a") as file:
            file.write(json.dumps([seen, drawn]) + "\\n")

    def execute(self, requests):
        return []
"""


def compared(seen: list[tuple[dict[str, Any], list[float]]]) -> None:
    (cold, _), (warm, first), (_, second) = seen
    assert warm == cold
    assert not set(first) & set(second)  # no two of them draw the same numbers


def read(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "seen").read_text().splitlines()]


@pytest.mark.skipif(warm_start._CLONE is None, reason="programs start as ever here")
def test_a_worker_of_this_process_sees_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> None:
        await (await load(tmp_path, LOOKS_AROUND)).close()

    with monkeypatch.context() as patch:
        patch.setenv(warm_start.COLD, "yes")
        asyncio.run(start())
    asyncio.run(start())
    asyncio.run(start())

    compared(read(tmp_path / "m"))
    assert read(tmp_path / "m")[1][0]["parent"] == os.getpid()
    assert warm_start._template is not None


@pytest.mark.skipif(warm_start._CLONE is None, reason="programs start as ever here")
@pytest.mark.parametrize("shape", [(), ("--front-ends=1",)], ids=["one-process", "front-ends-apart"])
def test_a_worker_of_a_server_sees_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[str, ...]
) -> None:
    folder = write_model(tmp_path, "m", LOOKS_AROUND, config=identity_pbtxt("python", dims=(4,)))

    with monkeypatch.context() as patch:
        patch.setenv(warm_start.COLD, "yes")
        with ServeProcess(tmp_path, *shape):
            pass
    for _ in range(2):
        with ServeProcess(tmp_path, *shape):
            pass

    seen = read(folder)
    parents = {each.pop("parent") for each, _ in seen}
    assert len(parents) == 3
    compared(seen)
