"""Functions of one file in one process: what they share, and what happens to all when it ends or the file changes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from tests.support.process import ServeProcess, eventually

SERVICE = """
import os

import charonia

calls = []
print("imported", flush=True)


@charonia.model
def first(x: int) -> list[int]:
    calls.append(x)
    return [os.getpid(), len(calls)]


@charonia.model
async def second(x: int) -> list[int]:
    calls.append(x)
    return [os.getpid(), len(calls)]


@charonia.model(own_process=True)
def apart(x: int) -> list[int]:
    calls.append(x)
    return [os.getpid(), len(calls)]


@charonia.model(max_batch_size=4)
class Counter:
    def __init__(self):
        print("made", flush=True)
        self.count = 0

    @charonia.method(max_batch_size=0, path="/count")
    def one(self, x: int) -> int:
        self.count += x
        return self.count

    @charonia.method(name="many")
    def several(self, x: list[int]) -> list[int]:
        self.count += sum(x)
        return [self.count] * len(x)

    def close(self):
        print(f"closed at {self.count}", flush=True)


@charonia.model
class Broken:
    def __init__(self):
        raise RuntimeError("no weights")

    def __call__(self, x: int) -> int:
        return x
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "service.py"
    path.write_text(SERVICE)
    return path


@pytest.fixture
def server(file: Path) -> Iterator[ServeProcess]:
    with ServeProcess(file, "--reload", "--exit-on-error=false", "--strict-readiness=false") as started:
        yield started


def ask(server: ServeProcess, model: str, x: Any = 1) -> Any:
    answer = requests.post(f"http://{server.http}/v2/models/{model}/generate", json={"x": x})
    return answer.json().get("output", answer.status_code)


def test_functions_share_a_process_and_one_that_fails_to_load_does_not_end_it(server: ServeProcess) -> None:
    (pid, calls), (same, more), (other, alone) = (ask(server, model) for model in ("first", "second", "apart"))

    assert (same, calls, more) == (pid, 1, 2)
    assert (other != pid, alone) == (True, 1)
    # One describes the file. A process in which `Broken` is the first, and alone when it fails, has ended.
    assert server.log.count("imported") in (3, 4)
    assert "no weights" in server.log
    assert ask(server, "Broken") != 1


def test_methods_share_one_object_which_is_closed_after_them(server: ServeProcess) -> None:
    assert ask(server, "one", 2) == 2
    assert ask(server, "many", [1, 2]) == [5, 5]
    assert requests.post(f"http://{server.http}/count", json={"x": 1}).json() == 6
    assert server.logs("made")

    server.stop()

    assert server.logs("closed at 6")
    assert (server.log.count("made"), server.log.count("closed at 6")) == (1, 1)


def test_a_process_that_ends_is_started_again_with_all_its_functions(server: ServeProcess) -> None:
    pid = ask(server, "first")[0]

    os.kill(pid, signal.SIGKILL)

    def are_back() -> bool:
        found = [ask(server, "first"), ask(server, "second")]
        return all(isinstance(each, list) and each[0] != pid for each in found) and found[0][0] == found[1][0]

    assert eventually(are_back)
    assert ask(server, "one", 2) == 2


def test_a_changed_file_is_imported_in_a_new_process(server: ServeProcess, file: Path) -> None:
    pid = ask(server, "first")[0]

    file.write_text(SERVICE.replace("len(calls)]", "-len(calls)]"))

    def are_new() -> bool:
        found = [ask(server, "first"), ask(server, "second")]
        return all(each[0] != pid and each[1] < 0 for each in found) and found[0][0] == found[1][0]

    assert eventually(are_new)
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_each_instance_of_functions_is_in_a_process_with_the_same_one_of_the_others(file: Path) -> None:
    with ServeProcess(file, "--workers=2", "--exit-on-error=false", "--strict-readiness=false") as server:
        workers = [each.cmdline() for each in psutil.Process(server.process.pid).children()]

        assert sum("shared" in each for each in workers) == 2
        assert ask(server, "first")[1] + ask(server, "second")[1] >= 2
