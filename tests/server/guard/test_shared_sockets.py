"""Listening sockets that a server gives to one that starts beside it."""

import asyncio
import os
import socket
from contextlib import ExitStack, closing

import pytest

from charonia.core.errors import Code, ServingError
from charonia.server.front_ends.processes import bound_sockets
from charonia.server.guard.control import copied_sockets, offer_sockets


def test_what_one_ends_with_waits_for_the_other() -> None:
    async def share(stack: ExitStack) -> tuple[list[socket.socket], list[dict[str, list[socket.socket]]]]:
        http, grpc = [await bound_sockets("127.0.0.1", 0, 2, stack) for _ in range(2)]
        own = [{"http": http[number], "grpc": grpc[number]} for number in range(2)]
        close = offer_sockets(os.getpid(), own)
        taken = await asyncio.to_thread(copied_sockets, os.getpid())
        close()
        return [sock for each in own for sockets in each.values() for sock in sockets], taken

    with ExitStack() as stack:
        with ExitStack() as of_the_first:
            own, taken = asyncio.run(share(of_the_first))
            copies = [stack.enter_context(sock) for each in taken for sockets in each.values() for sock in sockets]
            names = [sock.getsockname() for sock in own]
            copies[0].listen()
            client = stack.enter_context(socket.create_connection(names[0]))

        assert [list(each) for each in taken] == [["http", "grpc"]] * 2
        assert [sock.getsockname() for sock in copies] == names
        client.sendall(b"x")
        with closing(copies[0].accept()[0]) as accepted:
            assert accepted.recv(1) == b"x"


def test_a_process_that_shares_none_is_named() -> None:
    with pytest.raises(ServingError, match=rf"--beside: process {os.getpid()} is not a server that shares") as caught:
        copied_sockets(os.getpid())

    assert caught.value.code is Code.NOT_FOUND
