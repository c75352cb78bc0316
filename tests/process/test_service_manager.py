"""A server under a service manager: what it tells it, from the start to the end."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import ServeProcess


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", "echo", b"", config=identity_pbtxt("identity", dims=(4,)))
    return tmp_path / "models"


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(200)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield heard


def lines(manager: socket.socket, last: str) -> list[str]:
    heard: list[str] = []
    while last not in heard:
        heard += manager.recv(4096).decode().split("\n")
    return heard


def test_it_tells_when_it_is_ready_and_when_it_stops(repository: Path, manager: socket.socket) -> None:
    with ServeProcess(repository) as server:
        started = lines(manager, "READY=1")
        assert server.stop() == 0
        stopped = lines(manager, "STOPPING=1")

    assert started == ["STATUS=loading models", "READY=1", "STATUS=1 of 1 model versions ready"]
    assert stopped == ["STOPPING=1", "STATUS=stopping: requests in flight are finished"]


def test_it_tells_of_an_upgrade(repository: Path, manager: socket.socket) -> None:
    with ServeProcess(repository, "--front-ends=1") as server:
        lines(manager, "READY=1")
        server.process.send_signal(signal.SIGUSR2)
        begun = lines(manager, "RELOADING=1")
        over = lines(manager, "READY=1")
        assert server.stop() == 0

    at_us = next(int(line.split("=")[1]) for line in (*begun, *over) if line.startswith("MONOTONIC_USEC="))
    assert 0 < at_us <= time.monotonic_ns() // 1000
    assert "STATUS=upgrade: a new engine starts" in (*begun, *over)
    assert any(line.startswith("STATUS=serving; upgraded to release ") for line in over)


def test_it_sends_heartbeats_while_its_event_loop_turns(
    repository: Path, manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    with ServeProcess(repository) as server:
        lines(manager, "READY=1")
        for _ in range(2):
            lines(manager, "WATCHDOG=1")

        os.kill(server.process.pid, signal.SIGSTOP)
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            lines(manager, "none")
        os.kill(server.process.pid, signal.SIGCONT)
        manager.settimeout(200)
        lines(manager, "WATCHDOG=1")

        server.process.send_signal(signal.SIGABRT)  # as the service manager does when they stay away
        assert server.wait() == -signal.SIGABRT
    assert "Current thread" in server.log  # where it was, for the log


def test_a_model_that_fails_to_load_is_no_ready_server(tmp_path: Path, manager: socket.socket) -> None:
    write_model(tmp_path / "broken", "net", b"no model")

    with pytest.raises(RuntimeError, match="did not start"), ServeProcess(tmp_path / "broken"):
        pass

    assert "READY=1" not in lines(manager, "STOPPING=1")
