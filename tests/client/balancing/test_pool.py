"""Which server gets a request, and which get none for a while: rules, and random histories against them."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.client.balancing.options import Balancing
from charonia.client.balancing.pool import (
    SEQUENCES_MAX,
    SERVERS_MAX,
    SLOW_SAMPLES_MIN,
    PoolServer,
    RequestEnd,
    ServerPool,
    Unavailability,
)
from charonia.client.balancing.transport import prefix_of
from charonia.wire.endpoint import Endpoint

S = 1_000_000_000
MS = 1_000_000
EJECTED = (Unavailability.ERRORS, Unavailability.SLOW)


def endpoint(number: int) -> Endpoint:
    return Endpoint("http", f"server{number}", 8000, False, "")


def pool_of(count: int, seed: int = 7, **options: Any) -> ServerPool:
    pool = ServerPool(Balancing(**options), random.Random(seed).random)
    pool.set_endpoints(map(endpoint, range(count)))
    return pool


def run(pool: ServerPool, server: PoolServer, outcome: RequestEnd, now_ns: int, latency_ns: int = 0) -> None:
    server.begin(now_ns)
    pool.end(server, outcome, now_ns, latency_ns)


def test_the_less_busy_of_two_servers_gets_the_request() -> None:
    pool = pool_of(2)
    pool.all[0].begin(0)

    assert {pool.pick() for _ in range(20)} == {pool.all[1]}


def test_prompts_that_begin_alike_have_a_server_up_to_its_share_of_the_load() -> None:
    pool = pool_of(10, prefix_load=1.5)
    prefixes = [b"prefix %d" % number for number in range(100)]
    before = {prefix: pool.pick(prefix=prefix) for prefix in prefixes}
    assert before == {prefix: pool.pick(prefix=prefix) for prefix in prefixes}
    assert len(set(before.values())) == 10

    pool.set_endpoints(map(endpoint, range(1, 10)))
    moved = [prefix for prefix in prefixes if pool.pick(prefix=prefix) is not before[prefix]]
    assert all(server is not None and server.is_gone for server in (before[prefix] for prefix in moved))

    for _ in range(90):
        server = pool.pick(prefix=prefixes[0])
        assert server is not None
        server.begin(0)
    assert max(server.outstanding for server in pool.all) == 15
    assert min(server.outstanding for server in pool.all) < 10


@pytest.mark.parametrize(
    ("prompt", "prefix"),
    [
        (np.array([["a" * 300]], object), b"a" * 256),
        (["short"], b"short"),
        (b"a" * 2000, b"a" * 1024),
        (np.zeros((2, 2)), b""),
        (None, b""),
        ([], b""),
    ],
)
def test_the_prefix_of_a_prompt_has_whole_blocks(prompt: object, prefix: bytes) -> None:
    assert prefix_of(prompt) == prefix


def test_requests_spread_evenly_and_the_busiest_server_gets_none() -> None:
    pool = pool_of(10)
    for _ in range(1000):
        server = pool.pick()
        assert server is not None
        server.begin(0)

    counts = [server.outstanding for server in pool.all]
    assert sum(counts) == 1000
    assert max(counts) - min(counts) <= 6  # about log log n with two choices; a single random one: about 30


def test_a_server_that_cannot_be_reached_gets_nothing_until_it_is_ready() -> None:
    pool = pool_of(3, eject_s=1.0)
    lost = pool.all[1]
    run(pool, lost, RequestEnd.UNREACHABLE, 5 * S)

    assert lost not in {pool.pick() for _ in range(50)}
    assert pool.due(5 * S + S - 1) == []
    assert pool.due(6 * S) == [lost]
    assert pool.due(6 * S) == []  # it is being asked
    pool.probed(lost, True, 6 * S)
    assert lost in {pool.pick() for _ in range(50)}


def test_the_time_until_the_next_question_doubles_up_to_its_limit_and_begins_again_after_a_steady_time() -> None:
    pool = pool_of(2, eject_s=1.0, eject_s_max=4.0)
    lost = pool.all[0]
    now_ns, waits = 100 * S, []
    run(pool, lost, RequestEnd.UNREACHABLE, now_ns)
    for _ in range(4):
        begun_ns = now_ns
        while not pool.due(now_ns):
            now_ns += S
        waits.append((now_ns - begun_ns) // S)
        pool.probed(lost, False, now_ns)
    assert waits == [1, 2, 4, 4]

    pool.due(now_ns + 4 * S)
    pool.probed(lost, True, now_ns + 4 * S)
    run(pool, lost, RequestEnd.UNREACHABLE, now_ns + 9 * S)
    assert pool.due(now_ns + 9 * S + S) == [lost]


def test_failures_in_a_row_eject_a_server_and_a_response_between_them_does_not() -> None:
    pool = pool_of(3, errors_max=3)
    bad = pool.all[0]
    for outcome in (RequestEnd.FAILED, RequestEnd.FAILED, RequestEnd.ANSWERED, RequestEnd.FAILED, RequestEnd.FAILED):
        run(pool, bad, outcome, S)
    assert bad.trouble is None

    run(pool, bad, RequestEnd.FAILED, S)

    assert bad.trouble is Unavailability.ERRORS


def test_what_fails_on_every_server_ejects_none() -> None:
    pool = pool_of(4, errors_max=3)
    for _ in range(10):
        for server in pool.all:
            run(pool, server, RequestEnd.FAILED, S)

    assert [server.trouble for server in pool.all] == [None] * 4


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_at_most_half_of_the_servers_are_ejected(count: int, most: int) -> None:
    pool = pool_of(count, errors_max=1)
    for server in pool.all[:-1] or pool.all:
        run(pool, server, RequestEnd.FAILED, S)

    assert sum(server.trouble is Unavailability.ERRORS for server in pool.all) == most


def test_a_slow_server_is_ejected_and_its_latency_forgotten_when_it_is_back() -> None:
    pool = pool_of(3, slow_factor=5.0)
    slow = pool.all[2]
    for _ in range(SLOW_SAMPLES_MIN):
        for server in pool.all:
            run(pool, server, RequestEnd.ANSWERED, S, (120 if server is slow else 20) * MS)
    assert slow.trouble in EJECTED

    [asked] = pool.due(3 * S)
    pool.probed(asked, True, 3 * S)

    assert slow in {pool.pick() for _ in range(50)}
    assert (slow.samples, slow.latency_ns) == (0, 0)


def test_the_latency_of_a_server_is_the_mean_of_its_first_requests() -> None:
    pool = pool_of(1)
    server = pool.all[0]
    for latency_ms in (10, 20, 60):
        run(pool, server, RequestEnd.ANSWERED, S, latency_ms * MS)

    assert server.latency_ns == pytest.approx(30 * MS)


@pytest.mark.parametrize(("slow_ms", "options"), [(90, {}), (9, {}), (900, {"slow_factor": 0})])
def test_a_server_is_not_ejected_for_less(slow_ms: int, options: dict[str, Any]) -> None:
    pool = pool_of(3, **options)
    for _ in range(10 * SLOW_SAMPLES_MIN):
        for server in pool.all:
            fast_ms = 1 if slow_ms == 9 else 20
            run(pool, server, RequestEnd.ANSWERED, S, (slow_ms if server is pool.all[2] else fast_ms) * MS)

    assert [server.trouble for server in pool.all] == [None] * 3


def test_a_server_that_is_silent_while_requests_wait_is_asked_and_leaves_when_it_does_not_say_that_it_is_ready() -> (
    None
):
    pool = pool_of(2, stall_s=3.0)
    silent, other = pool.all
    silent.begin(10 * S)
    other.begin(10 * S)
    pool.record_contact(other, 12 * S)

    assert pool.due(13 * S - 1) == []
    assert pool.due(13 * S) == [silent]
    pool.probed(silent, False, 14 * S)
    assert silent.trouble is Unavailability.NOT_READY
    pool.end(silent, RequestEnd.ANSWERED, 14 * S)  # late, and no proof that it works now
    assert silent.trouble is Unavailability.NOT_READY


def test_a_server_that_works_on_long_requests_stays() -> None:
    pool = pool_of(2, stall_s=3.0)
    busy = pool.all[0]
    busy.begin(0)
    for second in range(3, 30, 3):
        assert pool.due(second * S) == [busy]
        pool.probed(busy, True, second * S)

    assert busy.trouble is None


def test_a_server_that_turns_a_request_away_is_asked_at_once() -> None:
    pool = pool_of(2)
    draining = pool.all[0]
    run(pool, draining, RequestEnd.TURNED_AWAY, S)

    assert pool.due(S) == [draining]


def test_all_servers_get_requests_when_all_are_out() -> None:
    pool = pool_of(3)
    for server in pool.all:
        run(pool, server, RequestEnd.UNREACHABLE, S)

    assert {pool.pick() for _ in range(60)} == set(pool.all)


def test_a_retry_goes_to_a_server_that_was_not_tried_even_to_one_that_is_out() -> None:
    pool = pool_of(3)
    first, second, out = pool.all
    run(pool, out, RequestEnd.UNREACHABLE, S)

    assert pool.pick([first]) is second
    assert pool.pick([first, second]) is out
    assert pool.pick(pool.all) is None


def test_addresses_that_stay_keep_their_state() -> None:
    pool = pool_of(3)
    kept = pool.all[1]
    kept.begin(0)

    added, gone = pool.set_endpoints([endpoint(1), endpoint(9), endpoint(9)])

    assert pool.all[0] is kept
    assert [server.endpoint for server in added] == [endpoint(9)]
    assert [server.endpoint for server in gone] == [endpoint(0), endpoint(2)]
    assert [server.is_gone for server in gone] == [True, True]


def test_there_is_a_limit_of_servers() -> None:
    assert len(pool_of(SERVERS_MAX + 10).all) == SERVERS_MAX


def test_beyond_the_limit_of_sequences_the_one_that_was_idle_longest_is_forgotten() -> None:
    pool = pool_of(1)
    for number in range(1, SEQUENCES_MAX + 1):
        pool.sequence_began(("m", number), pool.all[0])
    pool.server_of(("m", 1))

    pool.sequence_began(("m", "last"), pool.all[0])

    assert pool.server_of(("m", 1)) is pool.all[0]
    assert pool.server_of(("m", 2)) is None
    pool.sequence_ended(("m", 1))
    assert pool.server_of(("m", 1)) is None


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32), st.integers(1, 200))
def test_invariants_hold_in_random_histories(count: int, seed: int, steps: int) -> None:
    chance = random.Random(seed)
    options = Balancing(errors_max=2, eject_s=0.5, eject_s_max=2.0)
    pool = ServerPool(options, chance.random)
    pool.set_endpoints(map(endpoint, range(count)))
    now_ns = 0
    flying: list[PoolServer] = []
    asked: list[PoolServer] = []
    for _ in range(steps):
        now_ns += chance.randrange(S)
        match chance.randrange(5):
            case 0 | 1:
                server = pool.pick()
                assert server is not None
                assert server.trouble is None or all(other.trouble for other in pool.all)
                server.begin(now_ns)
                flying.append(server)
            case 2 if flying:
                server = flying.pop(chance.randrange(len(flying)))
                pool.end(server, chance.choice(list(RequestEnd)), now_ns, chance.randrange(10**9))
            case 3:
                out = [server for server in pool.all if server.trouble is not None]
                due = pool.due(now_ns)
                assert not set(due) & set(asked)
                asked += due
                if chance.random() < 0.2:
                    later = pool.due(now_ns + 2 * S)  # the limit of the back-off
                    asked += later
                    assert set(out) <= set(asked)
            case 4 if asked:
                server = asked.pop(chance.randrange(len(asked)))
                is_ready, was_out = chance.random() < 0.5, server.trouble is not None
                pool.probed(server, is_ready, now_ns)
                assert (server.trouble is None) == is_ready or (not was_out and server.is_gone)
        assert Counter(flying) == Counter({m: m.outstanding for m in pool.all if m.outstanding})
        assert sum(server.trouble in EJECTED for server in pool.all) <= count // 2
