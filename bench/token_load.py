"""Streams of tokens over OpenAI's API: many concurrent requests, and when their events arrive."""

import asyncio
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from bench.servers import HOST

_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"

PATH = "/v1/chat/completions"

_SCHEDULED = 2
"""Kind of a process's clock in Linux: CPU time in ns, where psutil's comes in ticks of 10 ms."""

ENGINE_PROCESSES = ("VLLM::EngineCor", "VLLM::Worker")
"""Prefixes of the names of processes that compute, for any server."""


@dataclass(frozen=True)
class StreamsRun:
    """Results of concurrent streams.

    Attributes:
        tokens_per_s: Tokens of all streams, by the time from the first request to the last event.
        events: Events that have arrived.
        first_ms: Time to the first event: 50th and 99th percentile.
        between_ms: Time from one event to the next: 50th and 99th percentile.
        serving_us: CPU time of the processes that serve, for each token.
    """

    tokens_per_s: float
    events: int
    first_ms: tuple[float, float]
    between_ms: tuple[float, float]
    serving_us: float


class _Stream(asyncio.Protocol):
    """One request; its events are counted, not read."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.arrivals: list[tuple[float, int]] = []
        self._request = request
        self._tail = b""
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.start = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._head:
            self._head = data[:200]
            if b" 200 " not in self._head:
                self.connection_lost(RuntimeError(f"the server answered {data[:500]!r}"))
                return
        joined = self._tail + data
        count = joined.count(_END)
        if _DONE in joined:
            count -= 1
            if not self.done.done():
                self.done.set_result(None)
        if count:
            self.arrivals.append((now, count))
        rest = joined[-len(_DONE) :]
        self._tail = rest[rest.rfind(_END) + len(_END) :] if _END in rest else rest

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or RuntimeError("the server has closed the connection"))


async def run_streams(port: int, bodies: Sequence[Mapping[str, Any]]) -> list[_Stream]:
    """Send all requests together; return their streams when all have ended."""
    loop = asyncio.get_running_loop()
    streams, transports = [], []
    for body in bodies:
        content = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        request = head.encode() + b"\r\n\r\n" + content
        transport, stream = await loop.create_connection(partial(_Stream, request), HOST, port)
        streams.append(stream)
        transports.append(transport)
    try:
        await asyncio.gather(*(stream.done for stream in streams))
    finally:
        for transport in transports:
            transport.close()
    return streams


def measure(port: int, server: int, bodies: Sequence[Mapping[str, Any]], tokens: int) -> StreamsRun:
    """Run streams, and return their results.

    Args:
        port: Of the server.
        server: Its process.
        bodies: Requests, each for so many tokens.
        tokens: Tokens of each.
    """
    before, start = serving_seconds(server), time.perf_counter()
    streams = asyncio.run(run_streams(port, bodies))
    seconds, used = time.perf_counter() - start, serving_seconds(server) - before
    first = [stream.arrivals[0][0] - stream.start for stream in streams]
    between: list[float] = []
    for stream in streams:
        last = stream.arrivals[0][0]
        for when, count in stream.arrivals[1:]:
            between += [when - last, *[0.0] * (count - 1)]
            last = when
    total = tokens * len(bodies)
    events = sum(count for stream in streams for _, count in stream.arrivals)
    return StreamsRun(total / seconds, events, _percentiles(first), _percentiles(between), used / total * 1e6)


def serving_seconds(pid: int) -> float:
    """Return the CPU time of a server's processes, compute processes excluded."""
    total = 0.0
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        try:
            if not process.name().startswith(ENGINE_PROCESSES):
                total += time.clock_gettime(~process.pid << 3 | _SCHEDULED)
        except (psutil.NoSuchProcess, OSError):
            continue
    return total


def middle(runs: Sequence[StreamsRun]) -> dict[str, Any]:
    """Return the medians of runs."""
    return {
        "tokens_per_s": round(statistics.median(run.tokens_per_s for run in runs), 1),
        "events": runs[0].events,
        "first_ms_p50": round(statistics.median(run.first_ms[0] for run in runs), 2),
        "first_ms_p99": round(statistics.median(run.first_ms[1] for run in runs), 2),
        "between_ms_p50": round(statistics.median(run.between_ms[0] for run in runs), 2),
        "between_ms_p99": round(statistics.median(run.between_ms[1] for run in runs), 2),
        "serving_us_per_token": round(statistics.median(run.serving_us for run in runs), 1),
    }


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(seconds) or [0.0]
    return ordered[len(ordered) // 2] * 1e3, ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3
