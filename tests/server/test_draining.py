"""How long a front end that stops waits for whom."""

import asyncio
import socket
import sys

import pytest
from tests.support.idle_time import IdleTimeLoop

from charonia.server.listening import GRACE_S, LOOK_S, QUIET_S, drain, drain_gradually, unsent_bytes


class Client:
    """A connection as draining sees it, and what its client does with it."""

    def __init__(self, connections: "set[Client]", untaken: int) -> None:
        self._connections = connections
        self.left = untaken
        self.heard = 0
        self.is_aborted = False
        self.ends_when_taken = True
        connections.add(self)

    def untaken(self) -> tuple[int, int]:
        return self.left, self.heard

    def wind_down(self) -> None:
        if self.ends_when_taken:
            self._connections.discard(self)

    def abort(self) -> None:
        self.is_aborted = True
        self._connections.discard(self)

    async def take(self, each_s: float) -> None:
        while self.left:
            await asyncio.sleep(each_s)
            self.left -= 1


new_loop = IdleTimeLoop


async def test_whoever_takes_something_now_and_then_gets_everything() -> None:
    connections: set[Client] = set()
    slow = Client(connections, untaken=10)
    taking = asyncio.create_task(slow.take(GRACE_S * 0.9))

    assert await drain(connections, 1000.0)
    await taking

    assert (slow.left, slow.is_aborted) == (0, False)
    assert 10 * GRACE_S * 0.9 <= asyncio.get_running_loop().time() < 10 * GRACE_S


async def test_whoever_takes_nothing_is_given_up_soon_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    connections: set[Client] = set()
    stuck, done = Client(connections, untaken=10), Client(connections, untaken=0)

    assert await drain(connections, 1000.0)

    assert (stuck.is_aborted, done.is_aborted) == (True, False)
    assert GRACE_S <= asyncio.get_running_loop().time() < 2 * GRACE_S
    assert caplog.messages == ["closing connections whose clients have not read all answers: 1"]


async def test_who_has_everything_is_waited_for_as_long_as_it_is_heard_of(caplog: pytest.LogCaptureFixture) -> None:
    connections: set[Client] = set()
    reading = Client(connections, untaken=0)
    reading.ends_when_taken = False

    async def speak() -> None:
        for _ in range(5):
            await asyncio.sleep(GRACE_S * 0.9)
            reading.heard += 1

    speaking = asyncio.create_task(speak())
    assert await drain(connections, 1000.0)
    await speaking

    assert reading.is_aborted
    assert asyncio.get_running_loop().time() >= 5 * GRACE_S * 0.9 + GRACE_S
    assert not caplog.messages


async def test_when_time_is_up_nobody_is_waited_for() -> None:
    connections: set[Client] = set()
    slow = Client(connections, untaken=100)
    taking = asyncio.create_task(slow.take(1.0))

    assert not await drain(connections, 10.0)
    taking.cancel()

    assert slow.is_aborted
    assert slow.left > 80


async def test_a_pause_of_the_machine_is_held_against_no_client() -> None:
    connections: set[Client] = set()
    client = Client(connections, untaken=1)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, IdleTimeLoop)

    async def pause() -> None:
        await asyncio.sleep(0.1)
        loop._clock.now_s += 10 * GRACE_S
        await asyncio.sleep(0.1)
        client.left = 0

    pausing = asyncio.create_task(pause())
    assert await drain(connections, 1000.0)
    await pausing

    assert not client.is_aborted


async def test_who_hands_on_ends_a_connection_only_when_it_has_been_quiet_for_a_while() -> None:
    connections: set[Client] = set()
    loop = asyncio.get_running_loop()
    quiet, used, busy = (Client(connections, untaken=0) for _ in range(3))
    uses: dict[Client, int | None] = {quiet: 0, used: 0, busy: None}
    ended_s: dict[Client, float] = {}

    def ask_to_close(client: Client) -> int | None:
        return uses[client]

    async def use() -> None:
        for _ in range(10):
            await asyncio.sleep(QUIET_S * 0.9)
            uses[used] = (uses[used] or 0) + 1

    async def watch() -> None:
        while connections:
            await asyncio.sleep(LOOK_S)
            for client in uses.keys() - connections:
                ended_s.setdefault(client, loop.time())

    others = asyncio.gather(use(), watch())
    await drain_gradually(connections, ask_to_close, QUIET_S, 100.0)
    assert loop.time() == pytest.approx(100.0, abs=0.1)
    assert connections == {busy}
    busy.abort()
    await others

    assert QUIET_S <= ended_s[quiet] < QUIET_S * 1.1
    assert 10 * QUIET_S * 0.9 + QUIET_S <= ended_s[used] < 11 * QUIET_S


async def test_who_hands_on_waits_for_connections_that_are_being_accepted() -> None:
    connections: set[Client] = set()
    loop = asyncio.get_running_loop()
    loop.call_later(QUIET_S / 2, Client, connections, 0)

    await drain_gradually(connections, lambda _: 0, QUIET_S, 100.0)

    assert QUIET_S * 1.5 <= loop.time() < QUIET_S * 1.6


async def test_who_lets_clients_go_stays_for_those_that_come_late() -> None:
    connections: set[Client] = set()
    loop = asyncio.get_running_loop()
    Client(connections, untaken=0)
    loop.call_later(3 * QUIET_S, Client, connections, 0)

    await drain_gradually(connections, lambda _: 0, QUIET_S, 5 * QUIET_S, least_s=5 * QUIET_S)

    assert loop.time() == pytest.approx(5 * QUIET_S, abs=0.1)
    assert not connections


class HalfTransport(asyncio.WriteTransport):
    def __init__(self, sock: socket.socket | None, waiting: int) -> None:
        super().__init__({"socket": sock})
        self._waiting = waiting

    def get_write_buffer_size(self) -> int:
        return self._waiting


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says")
def test_what_the_system_has_yet_to_deliver_counts() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert unsent_bytes(HalfTransport(here, 5)) == 5
        here.sendall(bytes(1000))

        assert unsent_bytes(HalfTransport(here, 5)) >= 1005
        assert unsent_bytes(HalfTransport(None, 5)) == 5

    assert unsent_bytes(HalfTransport(here, 5)) == 5
