"""A client of several servers: fake engines behind real ports."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from tests.support.client_servers import LOOPBACK, Served, read_request, scripted, served
from tests.support.process import until

from charonia.client import AsyncClient, Balancing, Client, ClientError, Failure, SequencePart
from charonia.client.balancing import transport
from charonia.client.balancing import transport as balanced
from charonia.core.errors import Code, ServingError, turned_away, unavailable

ROW = np.zeros((1, 16), np.float32)
FULL = turned_away("Exceeds maximum queue size of model 'identity'")
PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])
METADATA = b'{"name":"text","inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[-1,-1]}],"outputs":[]}'
NOBODY = "127.0.0.1:9"
LARGE_ROWS = 1 << 18  # 16 MiB, more than sockets hold
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@asynccontextmanager
async def servers(count: int) -> AsyncIterator[list[Served]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(served()) for _ in range(count)]


def urls(fleet: Sequence[Served], protocol: str) -> list[str]:
    return [each.urls[protocol] for each in fleet]


def received(fleet: Sequence[Served]) -> list[int]:
    return [len(each.engine.tickets) for each in fleet]


@PROTOCOLS
async def test_requests_go_to_all_servers(protocol: str) -> None:
    async with servers(3) as fleet, AsyncClient(urls(fleet, protocol)) as client:
        results = await asyncio.gather(*(client.infer("identity", {"INPUT0": ROW + n}) for n in range(90)))

        assert [result["OUTPUT0"][0, 0] for result in results] == list(range(90))
        assert sum(received(fleet)) == 90
        assert min(received(fleet)) > 15
        assert [status.url for status in client.endpoints()] == urls(fleet, protocol)
        assert [status.outstanding for status in client.endpoints()] == [0, 0, 0]


async def test_requests_name_the_server_that_they_go_to() -> None:
    seen = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            seen.add(request.split(b"\r\n")[1])
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with scripted(talk) as one, scripted(talk) as two, AsyncClient([one, two]) as client:
        for _ in range(20):
            await client.server_ready()
        assert seen == {f"Host: {url.removeprefix('http://')}".encode() for url in (one, two)}


@PROTOCOLS
async def test_a_request_that_no_model_has_seen_goes_to_another_server(protocol: str) -> None:
    async with servers(2) as fleet, AsyncClient([*urls(fleet, protocol)]) as client:
        fleet[0].engine.errors["identity"] = FULL
        for _ in range(20):
            await client.infer("identity", {"INPUT0": ROW})

        assert fleet[0].engine.tickets  # it was asked
        assert len(fleet[1].engine.tickets) == 20
        assert client.endpoints()[0].is_in  # it says that it is ready


@PROTOCOLS
async def test_a_server_where_nobody_listens_costs_no_request(protocol: str) -> None:
    async with servers(1) as fleet, AsyncClient([f"{protocol}://{NOBODY}", *urls(fleet, protocol)]) as client:
        await asyncio.gather(*(client.infer("identity", {"INPUT0": ROW}) for _ in range(30)))

        assert received(fleet) == [30]
        status = client.endpoints()[0]
        assert (status.is_in, status.trouble) == (False, "no connection can be made")


@PROTOCOLS
async def test_an_error_of_the_model_is_not_retried(protocol: str) -> None:
    async with servers(2) as fleet, AsyncClient(urls(fleet, protocol)) as client:
        for each in fleet:
            each.engine.errors["identity"] = unavailable("the worker has ended")
        with pytest.raises(ClientError, match=r"^the worker has ended$"):
            await client.infer("identity", {"INPUT0": ROW})

        assert sum(received(fleet)) == 1


@PROTOCOLS
async def test_a_connection_that_ends_after_the_request_was_sent_is_no_reason_to_retry(protocol: str) -> None:
    async with servers(2) as fleet, AsyncClient(urls(fleet, protocol)) as client:
        for each in fleet:
            each.engine.hold = True
        task = asyncio.create_task(client.infer("identity", {"INPUT0": ROW}))
        await until(lambda: sum(received(fleet)))
        assert client._servers._all is not None
        for transport in client._servers._all._transports.values():
            for connection in tuple(transport.dialer._open):  # type: ignore[attr-defined]
                connection.abort() if protocol == "grpc" else connection._transport.abort()
        with pytest.raises(ClientError) as caught:
            await task

        assert caught.value.failure is Failure.RESET
        assert sum(received(fleet)) == 1


async def test_a_connection_that_ends_before_all_of_the_request_was_sent_is_one() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    large = np.zeros((LARGE_ROWS, 16), np.float32)
    async with servers(1) as fleet, scripted(talk) as broken, AsyncClient([broken, *urls(fleet, "http")]) as client:
        while not client.endpoints()[0].failures[Failure.RESET]:
            result = await client.infer("identity", {"INPUT0": large})
            assert result["OUTPUT0"].shape == large.shape


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{"], ids=["none", "a part"])
async def test_a_connection_that_ends_when_the_request_was_read_is_none(answer: bytes) -> None:
    read = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        read.append(await read_request(reader))
        writer.write(answer)

    async with scripted(talk) as one, scripted(talk) as other, AsyncClient([one, other]) as client:
        with pytest.raises(ClientError) as caught:
            await client.infer("identity", {"INPUT0": ROW})

        assert caught.value.failure is Failure.RESET
        assert len(read) == 1


def frame(kind: int, stream: int, *numbers: int) -> bytes:
    payload = b"".join(number.to_bytes(4, "big") for number in numbers)
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big") + payload


DATA, HEADERS, RST_STREAM, GOAWAY = 0, 1, 3, 7
CANCEL, REFUSED = 8, 7


@pytest.mark.parametrize(
    ("end", "is_sent_again"),
    [
        pytest.param(lambda stream: frame(RST_STREAM, stream, REFUSED), True, id="refused"),
        pytest.param(lambda stream: frame(GOAWAY, 0, stream - 1, 0), True, id="excluded by GOAWAY"),
        pytest.param(lambda stream: frame(RST_STREAM, stream, CANCEL), False, id="reset"),
        pytest.param(lambda stream: frame(GOAWAY, 0, stream, 0), False, id="not excluded by GOAWAY"),
    ],
)
async def test_a_stream_is_sent_to_another_server_if_http2_says_that_it_was_not_processed(
    end: Callable[[int], bytes], is_sent_again: bool
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SETTINGS)
        await reader.readexactly(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        while True:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == HEADERS:
                writer.write(end(int.from_bytes(head[5:], "big")))
            elif head[3] == DATA and not is_sent_again:
                return

    async with (
        servers(1) as fleet,
        scripted(talk, "grpc") as broken,
        AsyncClient([broken, *urls(fleet, "grpc")]) as client,
    ):
        errors = []
        while not sum(client.endpoints()[0].failures.values()):
            try:
                await client.infer("identity", {"INPUT0": ROW})
            except ClientError as error:
                errors.append(error.failure)
        assert errors == ([] if is_sent_again else [Failure.RESET])


@PROTOCOLS
async def test_the_error_names_all_servers_that_were_asked(protocol: str) -> None:
    lost = [f"{protocol}://127.0.0.1:{port}" for port in (7, 8, 9)]
    async with AsyncClient(lost) as client:
        with pytest.raises(ClientError) as caught:
            await client.infer("identity", {"INPUT0": ROW})

        assert all(url in caught.value.message for url in lost)
        assert caught.value.failure is Failure.REFUSED


async def test_retries_stop_where_the_budget_ends() -> None:
    async with servers(2) as fleet, AsyncClient(urls(fleet, "http"), balancing=Balancing(retry_ratio=0)) as client:
        for each in fleet:
            each.engine.errors["identity"] = FULL
        with pytest.raises(ClientError, match=r"not sent to another server: too many retries"):
            await client.infer("identity", {"INPUT0": ROW})

        assert sum(received(fleet)) == 1


@PROTOCOLS
async def test_an_idempotent_request_is_hedged_and_the_loser_cancelled(protocol: str) -> None:
    balancing = Balancing(hedge_after_s=0.05, idempotent_models=["identity"])
    async with servers(2) as fleet, AsyncClient(urls(fleet, protocol), balancing=balancing) as client:
        fleet[0].engine.hold = True
        held = fleet[0].engine.tickets
        while not held:
            await asyncio.wait_for(client.infer("identity", {"INPUT0": ROW}), 5)

        await until(lambda: {ticket.cancelled for ticket in held} == {True})


async def test_other_requests_are_not_hedged() -> None:
    balancing = Balancing(hedge_after_s=0.02, idempotent_models=["identity"])
    async with servers(2) as fleet, AsyncClient(urls(fleet, "http"), balancing=balancing) as client:
        for each in fleet:
            each.engine.delay_s = 0.1
        await client.infer("text", {"INPUT0": np.array([[b"x"]], object)})
        assert sum(received(fleet)) == 1
        await client.infer("identity", {"INPUT0": ROW}, sequence=SequencePart(4, start=True))
        assert sum(received(fleet)) == 2
        await client.infer("identity", {"INPUT0": ROW})
        assert sum(received(fleet)) == 4


async def test_hedges_stop_where_the_budget_of_retries_ends() -> None:
    balancing = Balancing(hedge_after_s=0.01, idempotent_models=["*"], retry_ratio=0)
    async with servers(2) as fleet, AsyncClient(urls(fleet, "http"), balancing=balancing) as client:
        for each in fleet:
            each.engine.delay_s = 0.1
        await client.infer("identity", {"INPUT0": ROW})
        assert sum(received(fleet)) == 1


async def test_hedges_come_after_the_percentile_of_recent_latencies() -> None:
    balancing = Balancing(hedge_after_s="p95", idempotent_models=["*"])
    async with (
        servers(2) as fleet,
        AsyncClient(urls(fleet, "http"), balancing=balancing) as client,
    ):
        for each in fleet:
            each.engine.delay_s = 0.01
        for _ in range(40):
            await client.infer("identity", {"INPUT0": ROW})
        before = sum(received(fleet))
        for each in fleet:
            each.engine.delay_s = 0.5
        await client.infer("identity", {"INPUT0": ROW})

        assert sum(received(fleet)) == before + 2


@PROTOCOLS
async def test_sequences_keep_their_server(protocol: str) -> None:
    async with servers(3) as fleet, AsyncClient(urls(fleet, protocol)) as client:
        for step in range(4):
            for number in range(1, 21):
                part = SequencePart(number, start=step == 0, end=step == 3)
                await client.infer("identity", {"INPUT0": ROW}, sequence=part)

        owners = [{t.request.correlation_id for t in each.engine.tickets} for each in fleet]
        assert sorted(number for owner in owners for number in owner) == list(range(1, 21))
        assert len([owner for owner in owners if owner]) > 1
        with pytest.raises(ClientError, match=r"no request of this client has begun sequence 3 of model 'identity'"):
            await client.infer("identity", {"INPUT0": ROW}, sequence=SequencePart(3))


@PROTOCOLS
async def test_a_sequence_whose_server_is_gone_says_so(protocol: str) -> None:
    async with AsyncExitStack() as stack:
        doomed = await stack.enter_async_context(served())
        async with servers(1) as rest:
            client = await stack.enter_async_context(AsyncClient([doomed.urls[protocol], *urls(rest, protocol)]))
            rest[0].engine.errors["identity"] = FULL
            await client.infer("identity", {"INPUT0": ROW}, sequence=SequencePart("s", start=True))
            rest[0].engine.errors.clear()
            assert doomed.engine.tickets
            await client.infer("identity", {"INPUT0": ROW}, sequence=SequencePart("s"))
            assert client._servers._all is not None
            server = client._servers._all.pool.server_of(("identity", "s"))
            assert server is not None
            server.is_gone = True  # its name has other addresses now

            with pytest.raises(
                ClientError, match=r"sequence s of model 'identity' cannot continue: its server .* gone"
            ):
                await client.infer("identity", {"INPUT0": ROW}, sequence=SequencePart("s"))


async def test_the_deadline_goes_with_the_request_and_what_is_left_with_a_retry() -> None:
    async with servers(2) as fleet, AsyncClient(urls(fleet, "http")) as client:
        for each in fleet:
            each.engine.errors["identity"] = FULL
            each.engine.delay_s = 0.1
        with pytest.raises(ClientError, match="Exceeds maximum queue size"):
            await client.infer("identity", {"INPUT0": ROW}, timeout_s=2.0)

        first, second = sorted((each.engine.tickets[0].request.timeout_us for each in fleet), reverse=True)
        assert first == 2_000_000
        assert 1_000_000 < second < 1_950_000

        with pytest.raises(ClientError):
            await client.infer("identity", {"INPUT0": ROW}, parameters={"timeout": 77})
        assert {each.engine.tickets[1].request.timeout_us for each in fleet} == {77}


async def test_over_grpc_what_is_left_of_the_deadline_is_the_deadline_of_the_retry() -> None:
    async with servers(2) as fleet, AsyncClient(urls(fleet, "grpc")) as client:
        for each in fleet:
            each.engine.errors["identity"] = FULL
            each.engine.delay_s = 0.5
        begun_ns = time.monotonic_ns()
        with pytest.raises(ClientError, match="Exceeds maximum queue size"):
            await client.infer("identity", {"INPUT0": ROW}, timeout_s=2.0)

        deadlines = [each.engine.tickets[0].request.deadline_ns for each in fleet]
        assert abs(deadlines[0] - deadlines[1]) < 300_000_000  # the same moment, although one was sent later
        assert 1.9e9 < min(deadlines) - begun_ns < 2.4e9


@PROTOCOLS
async def test_the_timeout_is_that_of_all_servers_together(protocol: str) -> None:
    async with servers(2) as fleet, AsyncClient(urls(fleet, protocol)) as client:
        for each in fleet:
            each.engine.hold = True
        with pytest.raises(ClientError) as caught:
            await client.infer("identity", {"INPUT0": ROW}, timeout_s=0.2)
        assert caught.value.failure is Failure.TIMEOUT
        assert [status.outstanding for status in client.endpoints()] == [0, 0]


async def test_the_timeout_is_that_of_the_question_for_datatypes_too() -> None:
    left_us: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await read_request(reader):
            if b"/infer" in request:
                left_us.extend(re.findall(rb'"timeout":(\d+)', request))
            await asyncio.sleep(0.3)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(METADATA), METADATA))

    async with scripted(talk) as one, scripted(talk) as other, AsyncClient([one, other]) as client:
        with pytest.raises(ClientError) as caught:
            await client.infer("text", {"INPUT0": [["a"]]}, timeout_s=0.1)
        assert caught.value.failure is Failure.TIMEOUT
        assert left_us == []

        await client.infer("text", {"INPUT0": [["a"]]}, timeout_s=30)
        assert [0 < int(left) < 29_750_000 for left in left_us] == [True]


@PROTOCOLS
async def test_cancelling_a_task_cancels_the_request(protocol: str) -> None:
    async with servers(2) as fleet, AsyncClient(urls(fleet, protocol)) as client:
        for each in fleet:
            each.engine.hold = True
        task = asyncio.create_task(client.infer("identity", {"INPUT0": ROW}))
        await until(lambda: sum(received(fleet)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        tickets = [ticket for each in fleet for ticket in each.engine.tickets]
        await until(lambda: tickets[0].cancelled)
        assert [status.outstanding for status in client.endpoints()] == [0, 0]


async def test_a_stream_stays_with_its_server() -> None:
    async with servers(2) as fleet, AsyncClient(urls(fleet, "grpc")) as client:
        for each in fleet:
            each.engine.hold = True
        stream = client.stream_infer("identity", {"INPUT0": ROW})
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: sum(received(fleet)))
        [ticket] = [ticket for each in fleet for ticket in each.engine.tickets]
        engine = fleet[0].engine if fleet[0].engine.tickets else fleet[1].engine
        ticket.answer(engine.echo(ticket.request), False)
        await first
        ticket.answer(FULL)
        with pytest.raises(ClientError, match="Exceeds maximum"):  # not sent again: it has begun
            await anext(stream)
        assert sum(received(fleet)) == 1


async def test_what_changes_a_server_is_refused() -> None:
    async with AsyncClient("a:1,b:1") as client:
        changes = [
            client.load_model("m"),
            client.unload_model("m"),
            client.update_trace_settings({}),
            client.unregister_shared_memory(),
            client.traffic.reset("m"),
            client.traffic.update("m", {"weights": {}}),
        ]
        for change in changes:
            with pytest.raises(ServingError, match=r"a client of several servers, http://a:1, http://b:1") as error:
                await change
            assert error.value.code is Code.UNSUPPORTED


class Names:
    """A name server."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: list[str] = list(addresses)
        self.asked = 0

    async def resolve(self, name: str, port: int) -> list[str]:
        self.asked += 1
        if not self.addresses:
            raise OSError(-2, "Name or service not known")
        return self.addresses


@PROTOCOLS
async def test_each_address_of_a_name_is_a_server_and_new_ones_are_found(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balanced, "RESOLVE_AGAIN_S", 0.05)
    names = Names("127.0.0.1")

    async with servers(1) as [one]:
        port = one.urls[protocol].rsplit(":", 1)[1]
        balancing = Balancing(resolve_s=0.1)
        async with AsyncClient(f"dns+{protocol}://models.test:{port}", balancing=balancing) as client:
            assert client._servers._all is not None
            client._servers._all._resolve = names.resolve
            await asyncio.gather(*(client.infer("identity", {"INPUT0": ROW}) for _ in range(10)))
            assert [status.url for status in client.endpoints()] == [f"{protocol}://127.0.0.1:{port}"]

            names.addresses = ["127.0.0.2", "127.0.0.3"]
            await until(lambda: len(client.endpoints()) >= 2)
            names.addresses = []  # a name server that fails changes nothing
            asked = names.asked
            await until(lambda: names.asked >= asked + 2)
            assert [status.url for status in client.endpoints()] == [
                f"{protocol}://127.0.0.2:{port}",
                f"{protocol}://127.0.0.3:{port}",
            ]


async def test_a_name_without_an_address_is_an_error_and_the_next_request_looks_again() -> None:
    names = Names()

    async with servers(1) as [one], AsyncClient(f"dns+{one.urls['http']}") as client:
        assert client._servers._all is not None
        client._servers._all._resolve = names.resolve
        with pytest.raises(ClientError, match=r"cannot find dns\+http://127.*: Name or service not known"):
            await client.infer("identity", {"INPUT0": ROW})
        names.addresses = [LOOPBACK]
        await client.infer("identity", {"INPUT0": ROW})


async def test_a_name_server_that_does_not_answer_holds_a_request_for_its_timeout_only() -> None:
    async def hang(name: str, port: int) -> list[str]:
        await asyncio.sleep(600)
        return []

    async with AsyncClient("dns+grpc://models.test:8001") as client:
        assert client._servers._all is not None
        client._servers._all._resolve = hang
        begun_s = time.monotonic()
        with pytest.raises(ClientError, match=r"dns\+grpc://models\.test:8001 was not found in time") as caught:
            await client.infer("identity", {"INPUT0": ROW}, timeout_s=0.1)
        assert caught.value.failure is Failure.TIMEOUT
        assert time.monotonic() - begun_s < 200


async def test_names_are_looked_up_by_the_system() -> None:
    assert LOOPBACK in await transport.resolve("localhost", 80)
    async with servers(1) as [one], AsyncClient(f"dns+{one.urls['http']}") as client:
        assert await client.server_ready()


def test_the_blocking_client_balances_as_well() -> None:
    with Client(["127.0.0.1:7", "127.0.0.1:8"]) as client:
        with pytest.raises(ClientError, match=r"127\.0\.0\.1:7.*before.*127|127\.0\.0\.1:8.*before.*127"):
            client.infer("identity", {"INPUT0": ROW})
        assert [status.url for status in client.endpoints()] == ["http://127.0.0.1:7", "http://127.0.0.1:8"]


@PROTOCOLS
async def test_closing_the_client_fails_what_is_in_flight(protocol: str) -> None:
    async with servers(2) as fleet, AsyncClient(urls(fleet, protocol)) as client:
        for each in fleet:
            each.engine.hold = True
        task = asyncio.create_task(client.infer("identity", {"INPUT0": ROW}))
        await until(lambda: sum(received(fleet)))
        await client.close()
        with pytest.raises(ClientError, match="the client was closed"):
            await task
        with pytest.raises(ClientError, match="the client was closed"):
            await client.infer("identity", {"INPUT0": ROW})
