"""Listening sockets that several processes have: bound together, told to refuse, and listening again."""

import asyncio
import socket
from contextlib import ExitStack, closing

import pytest

from charonia.core.errors import Code, ServingError
from charonia.server.front_ends.processes import bound_sockets
from charonia.server.guard.supervisor import stop_listening

HOST = "127.0.0.1"


def bound(host: str, port: int, count: int, stack: ExitStack) -> list[tuple[socket.socket, ...]]:
    return asyncio.run(bound_sockets(host, port, count, stack))


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def is_refused(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex((HOST, port)) != 0


def test_they_refuse_until_one_listens_and_again_when_they_are_told_to() -> None:
    with ExitStack() as stack:
        (first,), (second,) = bound(HOST, 0, 2, stack)
        port = port_of(first)
        assert port_of(second) == port
        for _ in range(2):
            assert is_refused(port)
            first.listen()
            assert not is_refused(port)
            for _ in range(2):
                stop_listening(first)
            assert port_of(first) == port
    assert first.fileno() == -1


def test_a_connection_after_two_refusals_is_like_any() -> None:
    with ExitStack() as stack:
        ((sock,),) = bound(HOST, 0, 1, stack)
        stop_listening(sock)  # it does not listen yet
        sock.listen()
        stop_listening(sock)
        stop_listening(sock)
        sock.listen()
        client = stack.enter_context(socket.create_connection((HOST, port_of(sock))))
        client.sendall(b"x")

        with sock.accept()[0] as accepted:
            assert accepted.recv(1) == b"x"


def test_connections_go_to_those_that_listen() -> None:
    with ExitStack() as stack:
        (first,), (second,) = bound(HOST, 0, 2, stack)
        first.listen()
        second.listen()
        stop_listening(first)

        clients = [stack.enter_context(socket.create_connection((HOST, port_of(first)))) for _ in range(20)]

        for _ in clients:
            second.accept()[0].close()


def test_a_connection_waits_for_the_next_process() -> None:
    with ExitStack() as stack:
        ((bound_here,),) = bound(HOST, 0, 1, stack)
        with bound_here.dup() as of_a_process:
            of_a_process.listen()
        client = stack.enter_context(socket.create_connection((HOST, port_of(bound_here))))
        client.sendall(b"x")

        with bound_here.dup() as of_the_next:
            of_the_next.listen()
            accepted, _ = of_the_next.accept()

        with accepted:
            assert accepted.recv(1) == b"x"


def test_a_name_may_stand_for_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.1", "127.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with ExitStack() as stack:
        (one, other), more = bound("both", 0, 2, stack)

        assert [sock.getsockname()[0] for sock in (one, other)] == ["127.0.0.1", "127.0.0.2"]
        assert {port_of(sock) for sock in (one, other, *more)} == {port_of(one)}


def test_an_address_that_is_not_there_is_reported() -> None:
    with ExitStack() as stack, pytest.raises(ServingError, match=r"^cannot listen on 192\.0\.2\.1:8000: ") as refused:
        bound("192.0.2.1", 8000, 2, stack)

    assert refused.value.code is Code.UNAVAILABLE
    assert "no network interface of this machine has that address" in refused.value.hint
