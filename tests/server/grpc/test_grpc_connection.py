"""What a connection does about clients that break rules, and how it ends."""

import asyncio
import itertools
from typing import Any

import ngh2
import pytest
from tests.server.grpc.conftest import Bench
from tests.support.grpc_memory import MemoryResponse, MemoryTransport, frame, request_headers
from tests.support.idle_time import IdleTimeLoop
from tritonclient.grpc import service_pb2

from charonia.server.grpc.connection import EVENTS_AT_ONCE, EVENTS_PER_ROUND, PIECE_BYTES_MIN
from charonia.server.grpc.frontend import FIRST_CALL_S, QUIET_STREAM_S, GrpcLimits
from charonia.server.grpc.http2 import PREFACE
from charonia.server.listening import GRACE_S, LOOK_S, QUIET_S
from charonia.wire.grpc_status import Status

ENHANCE_YOUR_CALM = 11
INFER = b"\x0a\x08identity"  # a ModelInferRequest with no more than a model name
SETTINGS_FRAME = b"\0\0\0\4\0\0\0\0\0"

new_loop = IdleTimeLoop


def raw_connection(bench: Any) -> tuple[Any, MemoryTransport]:
    protocol = bench.frontend.connect()
    transport = MemoryTransport(protocol)
    protocol.connection_made(transport)
    return protocol, transport


def goaway_code(data: bytes) -> int:
    """Return the code of the GOAWAY frame that ends what a server sent."""
    while data[3] != 7:
        data = data[9 + int.from_bytes(data[:3], "big") :]
    return int.from_bytes(data[13:17], "big")


@pytest.mark.parametrize(
    "request_line", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"hello"]
)
async def test_a_client_that_speaks_something_else_is_told_and_closed(request_line: bytes, bench: Bench) -> None:
    protocol, transport = raw_connection(bench)
    protocol.data_received(request_line)

    answer = transport.take()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 505 ")
    assert f"content-length: {len(body)}".encode() in head
    assert transport.is_closed


async def test_a_preface_in_pieces_is_understood(bench: Bench) -> None:
    protocol, transport = raw_connection(bench)
    for byte in PREFACE + SETTINGS_FRAME:
        protocol.data_received(bytes((byte,)))

    assert not transport.is_closed
    assert transport.take()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (PREFACE + SETTINGS_FRAME + b"\0\0\4\0\1\0\0\0\7abcd", 1),
        (PREFACE + SETTINGS_FRAME + b"\0\0\5\1\5\0\0\0\1\xff\xff\xff\xff\xff", 9),
        (PREFACE + SETTINGS_FRAME * 3000, ENHANCE_YOUR_CALM),
        (PREFACE + SETTINGS_FRAME + b"\0\0\x08\6\0\0\0\0\0abcdefgh" * 3000, ENHANCE_YOUR_CALM),
    ],
    ids=["data of no stream", "headers that cannot be read", "a flood of settings", "a flood of pings"],
)
async def test_a_violation_ends_the_connection_with_its_reason(data: bytes, code: int, bench: Bench) -> None:
    protocol, transport = raw_connection(bench)
    protocol.data_received(data)
    while not transport.is_closed:
        await asyncio.sleep(0)

    assert goaway_code(transport.take()) == code


async def test_what_follows_a_violation_is_not_looked_at(bench: Bench) -> None:
    protocol, transport = raw_connection(bench)
    protocol.data_received(b"nonsense")
    transport.take()
    protocol.data_received(PREFACE)

    assert transport.take() == b""


async def test_a_violation_cancels_what_is_in_flight(bench: Bench) -> None:
    bench.engine.hold = True
    client = bench.client()
    client.start("ModelInfer", INFER)
    client.feed(b"\0\0\4\0\1\0\0\0\7abcd")
    await client.settle()

    assert bench.engine.tickets[0].cancelled


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({b":method": b"GET"}, b"405"),
        ({b"content-type": b"application/json"}, b"415"),
        ({b"content-type": None}, b"415"),
    ],
)
async def test_a_request_that_is_no_call_gets_an_http_status(changes: Any, status: bytes, bench: Bench) -> None:
    client = bench.client()
    headers = {**dict(request_headers("ServerLive")), **changes}
    stream_id = client.http2.send_request([(n, v) for n, v in headers.items() if v is not None])
    client.responses[stream_id] = MemoryResponse()
    client.exchange()

    response = client.responses[stream_id]
    assert (response.headers[b":status"], response.reset_code) == (status, 0)
    assert (await client.call("ServerLive")).status == Status.OK


async def test_headers_over_the_limit_are_refused_and_the_connection_lives(play: Any) -> None:
    async with play(GrpcLimits(header_list_bytes_max=2000)) as bench:
        client = bench.client()
        response = await client.call("ServerLive", b"", (b"x-large", b"v" * 2000))

        assert response.status == Status.RESOURCE_EXHAUSTED
        assert "at most 2000 bytes" in response.message
        assert (await client.call("ServerLive")).status == Status.OK


async def test_headers_far_over_the_limit_end_the_connection(play: Any) -> None:
    async with play(GrpcLimits(header_list_bytes_max=2000)) as bench:
        client = bench.client()
        client.start("ServerLive", b"", *((b"x-%d" % number, b"v" * 1000) for number in range(10)))

        assert client.goaways == [(ENHANCE_YOUR_CALM, b"")]
        assert client.transport.is_closed


async def test_streams_beyond_the_limit_are_refused_one_by_one(play: Any) -> None:
    async with play(GrpcLimits(streams_max=2)) as bench:
        protocol, transport = raw_connection(bench)
        client = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(peer_max_concurrent_streams=10))
        client.initiate_connection()
        streams = [client.send_request(request_headers("ModelStreamInfer")) for _ in range(3)]
        protocol.data_received(client.data_to_send())
        client.receive_data(transport.take())

        resets = [event for event in client.events() if isinstance(event, ngh2.StreamReset)]
        assert [(event.stream_id, event.error_code) for event in resets] == [(streams[2], 7)]


async def test_a_client_that_cancels_too_much_is_sent_away(play: Any) -> None:
    async with play(GrpcLimits(resets_burst=10, resets_per_s=0)) as bench:
        client = bench.client()
        for _ in range(10):
            stream_id = client.start("ModelStreamInfer")
            client.http2.reset_stream(stream_id)
            client.exchange()
        assert client.goaways == []
        stream_id = client.start("ModelStreamInfer")
        client.http2.reset_stream(stream_id)
        client.exchange()

        assert client.goaways == [(ENHANCE_YOUR_CALM, b"too_many_resets")]
        assert client.transport.is_closed


async def test_a_client_that_pings_too_much_is_sent_away(bench: Bench) -> None:
    client = bench.client()
    for _ in range(3):
        client.http2.ping()
        client.exchange()
    assert client.goaways == []
    client.http2.ping()
    client.exchange()

    assert client.goaways == [(ENHANCE_YOUR_CALM, b"too_many_pings")]
    assert client.transport.is_closed


async def test_a_client_may_ping_for_each_part_of_a_response_that_waits_for_its_window(bench: Bench) -> None:
    client = bench.client({ngh2.Setting.INITIAL_WINDOW_SIZE: 0}, opens_window=False)
    stream_id = client.start("ServerMetadata", b"")
    rounds = 0
    while client.responses[stream_id].status is None:
        rounds += 1
        client.http2.update_settings({ngh2.Setting.INITIAL_WINDOW_SIZE: 5 * rounds})
        client.exchange()
        client.http2.ping()  # as clients of gRPC do to measure the time to the server
        client.exchange()
        assert client.goaways == []

    assert rounds > 5
    for _ in range(3):
        client.http2.ping()
        client.exchange()
    assert client.goaways == [(ENHANCE_YOUR_CALM, b"too_many_pings")]


async def test_pings_between_answers_are_no_strikes(bench: Bench) -> None:
    client = bench.client()
    for _ in range(10):
        client.http2.ping()
        client.exchange()
        await client.call("ServerLive")

    assert client.goaways == []


@pytest.mark.parametrize("sent", [b"", PREFACE[:5], PREFACE, PREFACE + SETTINGS_FRAME[:4]])
async def test_a_connection_without_a_whole_handshake_is_closed(sent: bytes, bench: Bench) -> None:
    protocol, transport = raw_connection(bench)
    if sent:
        protocol.data_received(sent)
    await asyncio.sleep(19)
    assert not transport.is_closed
    await asyncio.sleep(3)

    assert transport.is_closed


HEADERS = b"\x00\x00\x40\x01\x04\x00\x00\x00\x01"
"""The head of a frame with 64 bytes of headers."""


@pytest.mark.parametrize(
    "sent",
    [HEADERS[:4], HEADERS, HEADERS + b"\x82" * 20, HEADERS.replace(b"\x40\x01\x04", b"\x01\x01\x00") + b"\x82"],
    ids=["half a head", "a head", "half of the headers", "headers that continue"],
)
async def test_half_of_a_frame_is_not_waited_for(sent: bytes, bench: Bench) -> None:
    protocol, transport = raw_connection(bench)
    protocol.data_received(PREFACE + SETTINGS_FRAME)
    protocol.data_received(sent)
    await asyncio.sleep(29)
    assert not transport.is_closed
    await asyncio.sleep(5)

    assert transport.is_closed


async def test_bytes_that_come_one_by_one_do_not_extend_the_time_for_headers(bench: Bench) -> None:
    protocol, transport = raw_connection(bench)
    protocol.data_received(PREFACE + SETTINGS_FRAME)
    for byte in HEADERS + b"\x82" * 8:
        protocol.data_received(bytes((byte,)))
        await asyncio.sleep(2)

    assert transport.is_closed


async def test_window_updates_and_pings_of_an_idle_client_are_no_half_frames(bench: Bench) -> None:
    client = bench.client()
    await client.call("ServerLive")
    client.feed(b"\0\0\4\x08\0\0\0\0\0\0\0\0\1" * 3)
    await asyncio.sleep(300)

    assert not client.transport.is_closed
    assert (await client.call("ServerLive")).status == Status.OK


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("sent", [b"", frame(INFER)[:3], frame(INFER)[:-1]])
async def test_half_of_a_message_ends_the_call(method: str, sent: bytes, bench: Bench) -> None:
    client = bench.client()
    stream_id = client.start(method)
    if sent:
        client.http2.send_data(stream_id, sent)
    client.exchange()
    await asyncio.sleep(59)
    client.exchange()
    assert client.responses[stream_id].status is None
    await asyncio.sleep(5)
    client.exchange()

    # A stream without a message is open as long as its caller likes.
    expected = None if method == "ModelStreamInfer" and not sent else Status.DEADLINE_EXCEEDED
    assert client.responses[stream_id].status == expected
    assert not client.transport.is_closed
    assert (await client.call("ServerLive")).status == Status.OK


async def test_a_message_that_comes_slowly_but_steadily_is_waited_for(bench: Bench) -> None:
    client = bench.client()
    stream_id = client.start("ModelInfer")
    message = frame(INFER + b"\x1a\x80\x80\x20" + bytes(2**19))
    for start in range(0, len(message), 8192):
        client.http2.send_data(stream_id, message[start : start + 8192])
        client.exchange()
        await asyncio.sleep(2)
    client.http2.end_stream(stream_id)
    await client.settle()

    assert client.responses[stream_id].status == Status.OK


async def test_messages_of_a_stream_have_their_time_each(bench: Bench) -> None:
    client = bench.client()
    stream_id = client.start("ModelStreamInfer")
    content = frame(INFER) * 25
    for size in (17, 17, 14) * 7:  # each read ends within a message
        client.http2.send_data(stream_id, content[:size])
        content = content[size:]
        client.exchange()
        await asyncio.sleep(10)

    assert client.responses[stream_id].status is None


async def test_one_connection_too_many_is_closed(play: Any) -> None:
    async with play(GrpcLimits(connections_max=1)) as bench:
        _, first = raw_connection(bench)
        _, second = raw_connection(bench)

        assert (first.is_closed, second.is_closed) == (False, True)
        assert second.take() == b""  # after SETTINGS and GOAWAY, the stock client reconnects without a pause
        first.abort()
        await asyncio.sleep(0)
        assert not raw_connection(bench)[1].is_closed


async def test_a_silent_client_is_pinged_and_closed_when_it_does_not_answer(play: Any) -> None:
    async with play(GrpcLimits(keepalive_time_s=0.04, keepalive_timeout_s=0.1)) as bench:
        client = bench.client()
        client.start("ModelStreamInfer")
        await asyncio.sleep(0.09)
        client.exchange()
        assert client.pings == 1
        await asyncio.sleep(0.3)

        assert client.transport.is_closed


async def test_a_client_that_answers_pings_stays(play: Any) -> None:
    async with play(GrpcLimits(keepalive_time_s=0.03, keepalive_timeout_s=0.2)) as bench:
        client = bench.client()
        client.start("ModelStreamInfer")
        for _ in range(20):
            await asyncio.sleep(0.02)
            client.exchange()

        assert client.pings == 2
        assert not client.transport.is_closed


@pytest.mark.parametrize(("permit", "pings"), [(False, 0), (True, 1)])
async def test_without_calls_pings_are_sent_only_where_permitted(play: Any, permit: bool, pings: int) -> None:
    async with play(GrpcLimits(keepalive_time_s=0.03, keepalive_without_calls=permit)) as bench:
        client = bench.client()
        await asyncio.sleep(0.1)
        client.exchange()

        assert client.pings == pings


async def test_an_old_connection_is_retired_gently(play: Any) -> None:
    async with play(GrpcLimits(connection_age_max_s=0.05)) as bench:
        client = bench.client()
        stream_id = client.start("ModelStreamInfer")
        await asyncio.sleep(0.3)
        client.exchange()
        assert client.goaways[0] == (0, b"")
        assert not client.transport.is_closed
        client.http2.end_stream(stream_id)
        client.exchange()
        await client.settle()

        assert client.responses[stream_id].status == Status.OK
        assert client.transport.is_closed


async def test_an_old_connection_is_closed_when_its_grace_is_over(play: Any) -> None:
    async with play(GrpcLimits(connection_age_max_s=0.02, connection_age_grace_s=0.05)) as bench:
        client = bench.client()
        client.start("ModelStreamInfer")
        await asyncio.sleep(0.3)

        assert client.transport.is_closed


async def test_an_idle_connection_is_retired(bench: Bench) -> None:
    client = bench.client()
    for _ in range(3):
        await asyncio.sleep(500)
        assert (await client.call("ServerLive")).status == Status.OK
    await asyncio.sleep(605)

    client.exchange()
    assert client.goaways
    assert client.transport.is_closed


async def test_a_connection_with_calls_is_not_idle(bench: Bench) -> None:
    client = bench.client()
    client.start("ModelStreamInfer")
    await asyncio.sleep(5000)

    assert not client.transport.is_closed


async def test_while_writing_is_paused_nothing_is_written_or_read(bench: Bench) -> None:
    client = bench.client()
    client.protocol.pause_writing()
    stream_id = client.start("ServerLive", b"")
    await client.settle()
    assert not client.transport.is_reading_on
    assert client.responses[stream_id].status is None
    client.protocol.resume_writing()
    await client.settle()

    assert client.transport.is_reading_on
    assert client.responses[stream_id].status == Status.OK


async def test_draining_finishes_what_is_in_flight_and_closes(bench: Bench) -> None:
    bench.engine.hold = True
    client, idle = bench.client(), bench.client()
    stream_id = client.start("ModelInfer", INFER)
    bench.frontend.stop_accepting()
    client.exchange()
    drained = asyncio.ensure_future(bench.frontend.drain(10.0))
    await asyncio.sleep(0.15)
    assert (client.transport.is_closed, idle.transport.is_closed, drained.done()) == (False, True, False)
    bench.engine.release(0)
    await client.settle()
    await drained

    assert client.goaways[0][0] == 0
    assert client.responses[stream_id].status == Status.OK
    assert client.transport.is_closed


async def test_who_hands_on_finishes_calls_and_streams_that_are_in_use(bench: Bench) -> None:
    idle, unary, stream = (bench.client() for _ in range(3))
    for client in (idle, unary, stream):
        client.transport.may_end = False
    await idle.call("ServerLive")
    bench.engine.hold = True
    held = unary.start("ModelInfer", INFER)
    bench.engine.hold = False
    stream_id = stream.start("ModelStreamInfer", INFER, end=False)
    handing = asyncio.create_task(bench.frontend.drain_gradually(1000.0))
    await asyncio.sleep(0.1)
    for client in (idle, unary, stream):
        client.exchange()
    await asyncio.sleep(QUIET_S + 0.5)
    assert (idle.transport.is_closed, unary.transport.is_closed) == (True, False)
    bench.engine.release(0)
    await unary.settle()
    await asyncio.sleep(QUIET_STREAM_S * 0.5)
    stream.http2.send_data(stream_id, frame(INFER))
    stream.exchange()
    await asyncio.sleep(QUIET_STREAM_S * 0.6)
    assert (unary.transport.is_closed, stream.transport.is_closed) == (True, False)
    await asyncio.sleep(QUIET_STREAM_S * 0.5)
    stream.exchange()
    await handing

    assert unary.responses[held].status == Status.OK
    assert stream.goaways[0] == (0, b"")
    assert len(stream.responses[stream_id].messages) == 2
    assert stream.responses[stream_id].status == Status.UNAVAILABLE
    assert stream.transport.is_closed


async def test_who_hands_on_lets_a_new_connection_have_its_first_call(bench: Bench) -> None:
    fresh, unused = bench.client(), bench.client()
    handing = asyncio.create_task(bench.frontend.drain_gradually(1000.0))
    await asyncio.sleep(FIRST_CALL_S / 2)
    late = bench.client()
    await asyncio.sleep(FIRST_CALL_S / 4)
    for client in (fresh, unused, late):
        client.exchange()
    assert fresh.goaways == unused.goaways == []
    call = fresh.start("ModelInfer", INFER)
    await asyncio.sleep(2 * LOOK_S)
    fresh.exchange()
    assert fresh.responses[call].status == Status.OK
    assert fresh.goaways[0] == (0, b"")
    await asyncio.sleep(FIRST_CALL_S / 2)
    unused.exchange()
    late.exchange()
    assert (unused.goaways, late.goaways) == ([(0, b"")], [])
    await asyncio.sleep(FIRST_CALL_S)
    late.exchange()
    await handing

    assert late.goaways[0] == (0, b"")
    assert all(client.transport.is_closed for client in (fresh, unused, late))


async def test_who_hands_on_serves_a_client_that_has_not_read_that_it_should_leave(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia.server.grpc.frontend.UNREAD_NOTICE_S", 3 * QUIET_S)

    async with play() as bench:
        silent = bench.client()
        silent.transport.may_end = False
        handing = asyncio.create_task(bench.frontend.drain_gradually(1000.0))
        await asyncio.sleep(2.5 * QUIET_S)
        assert silent.goaways == []
        call = silent.start("ModelInfer", INFER)
        assert silent.responses[call].status == Status.OK
        await asyncio.sleep(QUIET_S + 0.5)
        silent.exchange()
        await handing

        assert silent.transport.is_closed


async def test_draining_does_not_wait_for_ever(bench: Bench) -> None:
    bench.engine.hold = True
    client = bench.client()
    client.start("ModelInfer", INFER)
    bench.frontend.stop_accepting()
    await bench.frontend.drain(0.05)

    assert client.transport.is_closed
    assert bench.engine.tickets[0].cancelled


async def test_draining_waits_for_responses_that_wait_for_the_callers_window(bench: Bench) -> None:
    client = bench.client({ngh2.Setting.INITIAL_WINDOW_SIZE: 10}, opens_window=False)
    stream_id = client.start("ServerMetadata", b"")
    bench.frontend.stop_accepting()
    await asyncio.sleep(0.15)
    client.exchange()
    assert (client.transport.is_closed, client.responses[stream_id].status) == (False, None)
    client.http2.update_settings({ngh2.Setting.INITIAL_WINDOW_SIZE: 65_535})
    client.exchange()
    await client.settle()

    assert client.responses[stream_id].status == Status.OK
    assert client.transport.is_closed


async def test_a_client_that_opens_its_window_bit_by_bit_gets_its_whole_answer_while_the_server_stops(
    bench: Bench,
) -> None:
    client = bench.client({ngh2.Setting.INITIAL_WINDOW_SIZE: 0}, opens_window=False)
    stream_id = client.start("ServerMetadata", b"")
    bench.frontend.stop_accepting()
    draining = asyncio.create_task(bench.frontend.drain(1000.0))
    rounds = 0
    while client.responses[stream_id].status is None:
        assert not client.transport.is_closed
        rounds += 1
        client.http2.update_settings({ngh2.Setting.INITIAL_WINDOW_SIZE: 10 * rounds})
        client.exchange()
        await asyncio.sleep(GRACE_S * 0.9)
        client.exchange()
    assert await draining

    assert rounds > 3
    assert client.responses[stream_id].status == Status.OK


async def test_a_client_that_never_opens_its_window_is_given_up_when_the_server_stops(bench: Bench) -> None:
    client = bench.client({ngh2.Setting.INITIAL_WINDOW_SIZE: 0}, opens_window=False)
    client.start("ServerMetadata", b"")
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    bench.frontend.stop_accepting()

    assert await bench.frontend.drain(1000.0)
    assert loop.time() - begin_s < 2 * GRACE_S


async def test_a_client_that_still_reads_what_it_was_sent_is_not_cut_off_when_the_server_stops(bench: Bench) -> None:
    client = bench.client()
    client.transport.may_end = True
    await client.call("ServerLive")
    bench.frontend.stop_accepting()
    draining = asyncio.create_task(bench.frontend.drain(1000.0))
    for _ in range(5):
        await asyncio.sleep(GRACE_S * 0.9)
        client.feed(b"\0\0\4\10\0\0\0\0\0\0\0\1\0")  # of what it has read, 256 bytes more may come
        assert (client.transport.is_ended, client.transport.is_closed) == (True, False)
    await draining


async def test_a_connection_that_has_drained_is_left_to_the_client_to_close(bench: Bench) -> None:
    client = bench.client({ngh2.Setting.INITIAL_WINDOW_SIZE: 10}, opens_window=False)
    client.transport.may_end = True
    stream_id = client.start("ServerMetadata", b"")
    bench.frontend.stop_accepting()
    await asyncio.sleep(0.15)
    client.exchange()
    client.protocol.pause_writing()
    client.http2.update_settings({ngh2.Setting.INITIAL_WINDOW_SIZE: 65_535})
    client.exchange()
    client.protocol.resume_writing()
    await client.settle()

    assert client.responses[stream_id].status == Status.OK
    assert (client.transport.is_ended, client.transport.is_closed) == (True, False)
    assert client.transport.is_reading_on


async def test_closing_does_not_wait_for_a_client_that_does_not_read(bench: Bench) -> None:
    client = bench.client()
    client.transport.is_stuck = True
    bench.frontend.stop_accepting()
    await bench.frontend.drain(0.15)

    assert client.transport.is_closed


async def test_a_connection_that_ends_waits_for_its_client_as_long_as_that_reads(play: Any) -> None:
    async with play(GrpcLimits(keepalive_timeout_s=0.1)) as bench:
        protocol, transport = raw_connection(bench)
        transport.is_stuck = True
        protocol.data_received(b"hello")
        for _ in range(3):
            await asyncio.sleep(0.07)
            del transport.written[:10]
        assert not transport.is_closed
        await asyncio.sleep(0.25)

        assert transport.is_closed


async def test_data_of_a_stream_that_was_answered_early_does_not_use_up_the_window(play: Any) -> None:
    async with play(GrpcLimits(connection_window_bytes=65_535)) as bench:
        client = bench.client()
        for _ in range(40):
            stream_id = client.http2.send_request(request_headers("/no.Service/Method"))
            client.responses[stream_id] = MemoryResponse()
            client.http2.send_data(stream_id, frame(bytes(4000)))
            client.exchange()
        response = await client.call("ServerLive")

        assert response.status == Status.OK
        assert client.http2.remote_window_size > 16_000


async def test_each_connection_has_some_calls_handled_in_a_round_of_the_loop(bench: Bench) -> None:
    bench.engine.hold = True
    client, count = bench.client(), 200
    for _ in range(count):
        stream_id = client.http2.send_request(request_headers("ModelInfer"))
        client.http2.send_data(stream_id, frame(INFER), end_stream=True)
    client.feed(client.http2.data_to_send())

    counts = [len(bench.engine.tickets)]
    while counts[-1] < count:
        assert not client.transport.is_reading_on
        await asyncio.sleep(0)
        counts.append(len(bench.engine.tickets))

    assert client.transport.is_reading_on
    assert counts[0] <= EVENTS_AT_ONCE
    assert all(later - sooner <= EVENTS_PER_ROUND for sooner, later in itertools.pairwise(counts))


async def test_a_large_tensor_needs_no_further_round(bench: Bench) -> None:
    large = service_pb2.ModelInferRequest(model_name="identity", raw_input_contents=[bytes(4 * 150_000)])
    large.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 150_000])

    client = bench.client()
    stream_id = client.http2.send_request(request_headers("ModelInfer"))
    client.http2.send_data(stream_id, frame(large.SerializeToString()), end_stream=True)
    client.feed(client.http2.data_to_send())

    assert len(bench.engine.tickets) == 1
    assert client.transport.is_reading_on


async def test_calls_that_are_cancelled_with_what_began_them_never_begin_but_count(play: Any) -> None:
    async with play(GrpcLimits(resets_burst=30, resets_per_s=0)) as bench:
        protocol, transport = raw_connection(bench)
        client = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration())
        client.initiate_connection({})
        client.receive_data(transport.take())

        def send(cancelled: int) -> int:
            parts = []
            for _ in range(cancelled):
                stream_id = client.send_request(request_headers("ModelInfer"))
                client.send_data(stream_id, frame(INFER), end_stream=True)
                parts.append(client.data_to_send())
                client.reset_stream(stream_id)
                parts.append(client.data_to_send())
            kept: int = client.send_request(request_headers("ModelInfer"))
            client.send_data(kept, frame(INFER), end_stream=True)
            protocol.data_received(b"".join([*parts, client.data_to_send()]))
            return kept

        send(20)
        await asyncio.sleep(0)
        assert len(bench.engine.tickets) == 1
        assert not transport.is_closed
        send(11)
        assert goaway_code(transport.take()) == ENHANCE_YOUR_CALM


async def test_a_flood_of_cancelled_calls_is_parsed_in_many_rounds(bench: Bench) -> None:
    client, parts = bench.client(), []
    for _ in range(2000):
        stream_id = client.http2.send_request(request_headers("ModelInfer"))
        parts.append(client.http2.data_to_send())
        client.http2.reset_stream(stream_id)
        parts.append(client.http2.data_to_send())
    data = b"".join(parts)
    client.feed(data)

    rounds = 1
    while not client.transport.is_reading_on:
        await asyncio.sleep(0)
        rounds += 1

    assert rounds >= len(data) // PIECE_BYTES_MIN - 5  # pieces are larger at first


async def test_the_next_connections_of_an_offender_wait_before_they_are_read(bench: Bench) -> None:
    limits = bench.frontend.service.limits

    def connect(address: str) -> tuple[Any, MemoryTransport]:
        protocol = bench.frontend.connect()
        transport = MemoryTransport(protocol)
        transport.peername = (address, 1)
        protocol.connection_made(transport)
        return protocol, transport

    good_transport = connect("a")[1]
    bad, bad_transport = connect("a")
    bad.data_received(PREFACE + SETTINGS_FRAME + b"\0\0\x08\6\0\0\0\0\0abcdefgh" * 10)
    await asyncio.sleep(0)
    assert bad_transport.is_closed

    again, other = connect("a")[1], connect("b")[1]
    await asyncio.sleep(0)
    assert (again.is_reading_on, other.is_reading_on, good_transport.is_reading_on) == (False, True, True)
    await asyncio.sleep(limits.abuser_wait_s + 0.1)
    assert again.is_reading_on
    for transport in (again, other, good_transport):
        transport.abort()
    await asyncio.sleep(0)
