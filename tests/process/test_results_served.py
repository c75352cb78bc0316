"""Results to come of a server with several front ends: every one of them knows their progress, and cancels them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from tests.support.process import ServeProcess, eventually

SERVICE = """
import os
import time

import charonia


@charonia.model
def slow(go: str, request: charonia.Request) -> str:
    request.progress(0.5, "half of it")
    while not os.path.exists(go):
        time.sleep(0.01)
    return "done"
"""
POLLS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    file = tmp_path_factory.mktemp("service") / "service.py"
    file.write_text(SERVICE)
    with ServeProcess(file, "--front-ends=2") as process:
        yield process


def start(server: ServeProcess, go: Path) -> str:
    """Start a call that ends when a file is there, and return the address of its result."""
    url = f"http://{server.http}/v2/models/slow/generate"
    accepted = requests.post(url, json={"go": str(go)}, headers={"Prefer": "respond-async"}, timeout=200)
    assert accepted.status_code == 202, accepted.text
    return f"http://{server.http}{accepted.headers['location']}"


def polled(url: str) -> list[requests.Response]:
    """Return the responses to several polls, each on its own connection: some reach another front end."""
    return [requests.get(url, timeout=200) for _ in range(POLLS)]


def test_every_front_end_has_the_progress_and_the_result(server: ServeProcess, tmp_path: Path) -> None:
    go = tmp_path / "go"
    url = start(server, go)

    eventually(lambda: requests.get(url, timeout=200).json().get("progress") == 0.5)
    assert {answer.json()["message"] for answer in polled(url)} == {"half of it"}
    go.touch()
    eventually(lambda: requests.get(url, timeout=200).status_code == 200)
    assert {answer.json()["output"] for answer in polled(url)} == {"done"}


def test_every_front_end_cancels(server: ServeProcess, tmp_path: Path) -> None:
    urls = [start(server, tmp_path / "never") for _ in range(4)]

    assert {requests.delete(url, timeout=200).json()["status"] for url in urls} == {"cancelled"}
    assert {answer.status_code for answer in polled(urls[0])} == {404}
    (tmp_path / "never").touch()
