"""The live view of a run: its state without a server, and its server on loopback."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
from tests.support.runs import synthetic_run

from charonia.cli import perf_run
from charonia.cli.perf_run import POINTS_MAX, STREAMS_MAX, LiveRun, live_view
from charonia.core.errors import Code, ServingError
from charonia.tools.perf.api import LevelBegun, LevelDone, LevelTick
from charonia.tools.results.records import LoadLevel, LoadMode

LEVELS = tuple(LoadLevel(LoadMode.CONCURRENCY, value) for value in (1, 2))
RUN = synthetic_run(LEVELS)
BEFORE = replace(RUN, levels=())
FIRST = replace(RUN, levels=RUN.levels[:1])
TICK = LevelTick(LEVELS[0], 2.0, 6.0, 1812.0, 470_000, 1_950_000, 4, 3, 2, 10)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 0.25
        return self.now_s


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> LiveRun:
    monkeypatch.setattr(perf_run, "PACE_S", 0.0)
    made = LiveRun(Clock())
    made(LevelBegun(LEVELS[0], 1, 2, BEFORE))
    return made


def read(events: Iterator[bytes]) -> dict[str, Any]:
    text = next(events)
    assert text.startswith(b"data: ")
    assert text.endswith(b"\n\n")
    found: dict[str, Any] = json.loads(text[6:])
    return found


def identity_of(page: bytes) -> str:
    data = re.search(rb'<script type="application/json" id="data">(.*?)</script>', page)
    assert data
    return str(json.loads(data[1])["page"])


def test_an_event_says_what_is_measured_and_how_far_the_run_is(run: LiveRun) -> None:
    run(TICK)

    now = read(run.events())

    assert (now["level"], now["number"], now["count"]) == ("concurrency 1", 1, 2)
    assert (now["window"], now["windows"], now["inFlight"], now["errors"]) == (2, 10, 4, 3)
    # 6 s of this level, and 8 s of the other one, after 2 s.
    assert (now["left"], now["share"]) == ("14 s", 2 / 16)
    assert now["points"] == [[250, 1812.0, 470_000, 1_950_000, "concurrency 1"]]


def test_a_page_gets_all_points_once_and_then_the_new_ones(run: LiveRun) -> None:
    run(TICK)
    run(TICK)
    events = run.events()

    counts = [len(read(events)["points"])]
    counts.append(len(read(events)["points"]))
    run(TICK)
    counts.append(len(read(events)["points"]))
    for _ in range(POINTS_MAX + 5):
        run(TICK)
    counts.append(len(read(events)["points"]))

    assert counts == [2, 0, 1, POINTS_MAX]


def test_the_page_is_that_of_the_event_and_another_one_after_each_level(run: LiveRun) -> None:
    first, events = run.page(), run.events()
    pages = [read(events)["page"]]
    assert identity_of(first) == pages[0]
    assert b"<h2>Levels</h2>" not in first

    run(LevelDone(RUN.levels[0], FIRST))
    pages.append(read(events)["page"])
    run(LevelBegun(LEVELS[1], 2, 2, FIRST))
    pages.append(read(events)["page"])

    assert len(set(pages)) == 3
    assert identity_of(run.page()) == pages[2]
    assert b"<h2>Levels</h2>" in run.page()


def test_a_page_is_made_once_for_all_who_ask(run: LiveRun) -> None:
    assert run.page() is run.page()


def test_the_page_may_connect_to_its_server_and_the_final_one_may_not(run: LiveRun) -> None:
    live = run.page()
    run.end(RUN)
    final = run.page()

    assert b"connect-src 'self'" in live
    assert b'<section id="live"' in live
    assert b"connect-src" not in final
    assert b'id="live"' not in final
    assert b"EventSource" not in final


def test_the_end_waits_for_pages_that_follow_to_load_the_final_one(
    run: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perf_run, "FAREWELL_S", 60.0)
    with run.following() as is_taken:
        events = run.events()
        shown = read(events)["page"]
        ending = Thread(target=run.end, args=(RUN,))
        ending.start()
        while read(events)["page"] == shown:
            pass
        assert ending.is_alive()
        run.page()
        run.taken()
        ending.join(60)

    assert is_taken
    assert not ending.is_alive()
    assert list(events) == []


def test_the_end_waits_for_no_page_where_none_is_open(run: LiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_run, "FAREWELL_S", 600.0)

    run.end(RUN)


def test_one_page_too_many_is_refused_until_another_one_has_gone(run: LiveRun) -> None:
    pages = [run.following() for _ in range(STREAMS_MAX)]
    taken = [page.__enter__() for page in pages]
    with run.following() as is_taken:
        pass
    pages[0].__exit__(None, None, None)
    with run.following() as is_taken_later:
        pass

    assert (all(taken), is_taken, is_taken_later) == (True, False, True)


@contextmanager
def asked(port: int, path: str, host: str = "") -> Iterator[http.client.HTTPResponse]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", path, headers={"Host": host} if host else {})
        yield connection.getresponse()


def test_a_browser_on_this_machine_follows_the_run_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with live_view(0) as live:
        assert live is not None
        address = re.fullmatch(r"live view: http://127\.0\.0\.1:(\d+)/\n", capsys.readouterr().err)
        assert address
        port = int(address[1])
        live(LevelBegun(LEVELS[0], 1, 2, BEFORE))
        with asked(port, "/") as page:
            assert (page.status, page.getheader("Cache-Control")) == (200, "no-store")
            identity = identity_of(page.read())
        with asked(port, "/events") as events:
            assert events.getheader("Content-Type") == "text/event-stream"
            assert json.loads(events.readline()[6:])["page"] == identity
            ending = Thread(target=live.end, args=(RUN,))
            ending.start()
            # Each event ends with an empty line.
            while (line := events.readline()) == b"\n" or json.loads(line[6:])["page"] == identity:
                pass
            with asked(port, "/") as final:
                assert b"EventSource" not in final.read()
            ending.join(30)
            assert events.read() == b"\n"
        for path, host, status in (("/other", "", 404), ("/", f"rebound.example:{port}", 421)):
            with asked(port, path, host) as answer:
                assert answer.status == status

    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 5)


def test_a_port_that_is_taken_is_an_error_before_anything_is_measured() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=f"--live: cannot listen on 127.0.0.1:{port}") as caught, live_view(port):
            pass

    assert caught.value.code is Code.UNAVAILABLE
    assert "free one" in caught.value.hint


def test_without_the_option_there_is_no_view(capsys: pytest.CaptureFixture[str]) -> None:
    with live_view(None) as live:
        assert live is None

    assert capsys.readouterr().err == ""
