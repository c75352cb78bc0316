"""What a service tells its service manager: addresses, messages, heartbeats."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from charonia.server.guard.notify import (
    MESSAGE_BYTES_MAX,
    PINGS_PER_LIMIT,
    READY,
    WATCHDOG,
    Notifier,
    read_finish,
    socket_address,
    status,
    watchdog_s,
    write_finish,
)


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A service manager's socket, and NOTIFY_SOCKET for it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@charonia-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(name.replace("@", "\0"))
        heard.settimeout(200)
        yield heard, name


@pytest.mark.parametrize(
    ("name", "address"),
    [("/run/notify", "/run/notify"), ("@abc", "\0abc"), ("", ""), ("vsock:2:1", ""), ("relative", "")],
)
def test_the_address_of_a_socket(name: str, address: str) -> None:
    assert socket_address(name) == address


@pytest.mark.parametrize(
    ("microseconds", "pid", "seconds"),
    [("3000000", "", 3.0), ("3000000", "7", 3.0), ("3000000", "8", 0.0), ("", "", 0.0), ("soon", "", 0.0)],
)
def test_the_watchdog_is_for_the_process_that_it_names(microseconds: str, pid: str, seconds: float) -> None:
    assert watchdog_s(microseconds, pid, own_pid=7) == seconds


def test_a_status_is_one_line() -> None:
    assert status("model 'a'\n  failed\nREADY=1") == "STATUS=model 'a' failed READY=1"
    assert len(status("é" * MESSAGE_BYTES_MAX).encode()) < MESSAGE_BYTES_MAX


def test_messages_reach_the_manager_and_workers_do_not_inherit_its_address(
    manager: tuple[socket.socket, str],
) -> None:
    heard, name = manager
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}

    notifier = Notifier.taken_from(environment)
    notifier.send(READY, status("2 of 2 model versions ready"))

    assert heard.recv(MESSAGE_BYTES_MAX) == b"READY=1\nSTATUS=2 of 2 model versions ready"
    assert notifier.limit_s == 2.0
    assert environment == {"HOME": "/"}


def test_a_manager_that_is_gone_or_does_not_read_costs_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        notifier = Notifier(str(tmp_path / "notify"))
        for _ in range(10_000):  # more than the socket holds
            notifier.send(READY)
    notifier.send(READY)


def test_without_a_manager_nothing_is_sent() -> None:
    Notifier.taken_from({}).send(READY)


def test_a_front_end_stops_if_the_time_for_its_connections_cannot_be_read(tmp_path: Path) -> None:
    write_finish(tmp_path, "front_end_1", 2.5)
    (tmp_path / "front_end_2.finish").write_text("")  # the disk was full
    (tmp_path / "front_end_3.finish").mkdir()

    assert [read_finish(tmp_path, f"front_end_{number}") for number in range(1, 5)] == [2.5, None, None, None]


async def pings(notifier: Notifier, heard: socket.socket) -> list[bytes]:
    task = asyncio.create_task(notifier.ping())
    heard.setblocking(False)
    received = [await asyncio.get_running_loop().sock_recv(heard, MESSAGE_BYTES_MAX) for _ in range(3)]
    task.cancel()
    return received


def test_heartbeats_come_from_the_event_loop_until_they_are_stopped(manager: tuple[socket.socket, str]) -> None:
    heard, name = manager

    assert asyncio.run(pings(Notifier(socket_address(name), PINGS_PER_LIMIT * 0.001), heard)) == [WATCHDOG.encode()] * 3


def test_without_a_watchdog_there_are_no_heartbeats() -> None:
    asyncio.run(Notifier().ping())  # ends at once
