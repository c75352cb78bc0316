import pytest

from charonia.server.grpc.limits import (
    IDLE_PING_INTERVAL_NS,
    OFFENDERS_MAX,
    SETTINGS_COST,
    AbuseLimits,
    AbusiveAddresses,
    GrpcLimits,
)
from charonia.server.options import CompressionLevel, GrpcOptions

S = 1_000_000_000


def abuse_limits(limits: GrpcLimits) -> AbuseLimits:
    return AbuseLimits(limits, AbusiveAddresses(limits.abuser_kept_s))


def test_pings_that_keep_their_distance_are_no_strikes() -> None:
    conduct = abuse_limits(GrpcLimits(ping_interval_min_s=10.0, ping_strikes_max=1))

    assert all(conduct.may_ping(number * 10 * S, 0, has_calls=True) for number in range(20))


def test_one_ping_more_than_the_strikes_allow_is_too_many() -> None:
    conduct = abuse_limits(GrpcLimits(ping_interval_min_s=10.0, ping_strikes_max=2))

    assert [conduct.may_ping(number * S, 0, has_calls=True) for number in range(4)] == [True, True, True, False]


def test_whatever_is_sent_forgives_earlier_pings() -> None:
    conduct = abuse_limits(GrpcLimits(ping_interval_min_s=10.0, ping_strikes_max=1))

    assert all(conduct.may_ping(number, number // 2, has_calls=True) for number in range(20))


@pytest.mark.parametrize(("permit", "stays"), [(False, False), (True, True)])
def test_without_calls_pings_are_rare_unless_permitted(permit: bool, stays: bool) -> None:
    limits = GrpcLimits(ping_interval_min_s=10.0, ping_strikes_max=1, keepalive_without_calls=permit)
    conduct = abuse_limits(limits)

    outcomes = [conduct.may_ping(number * (IDLE_PING_INTERVAL_NS - 1), 0, has_calls=False) for number in range(3)]

    assert outcomes[-1] is stays


def test_no_limit_of_strikes_means_none() -> None:
    conduct = abuse_limits(GrpcLimits(ping_strikes_max=0))

    assert all(conduct.may_ping(number, 0, has_calls=True) for number in range(100))


def test_cancelled_calls_draw_on_an_allowance_that_refills() -> None:
    conduct = abuse_limits(GrpcLimits(resets_burst=2, resets_per_s=1))

    assert [conduct.may_reset(0) for _ in range(3)] == [True, True, False]
    assert [conduct.may_reset(3 * S) for _ in range(3)] == [True, True, False]


def test_limits_follow_the_options_of_the_server() -> None:
    options = GrpcOptions(
        input_bytes_max=1000,
        response_compression=CompressionLevel.HIGH,
        keepalive_time_ms=1500,
        max_connection_age_ms=2000,
        http2_max_ping_strikes=7,
    )

    limits = GrpcLimits.of(options)

    assert (limits.message_bytes_max, limits.compression_level, limits.ping_strikes_max) == (1000, 9, 7)
    assert (limits.keepalive_time_s, limits.connection_age_max_s, limits.ping_interval_min_s) == (1.5, 2.0, 300.0)


def test_an_offender_may_cancel_fewer_calls_at_once() -> None:
    abusers = AbusiveAddresses(kept_s=10.0)
    limits = GrpcLimits(resets_burst=10, resets_per_s=2)
    first = AbuseLimits(limits, abusers)
    assert not first.begin("a", 0)
    first.record_abuse(0)
    conduct = AbuseLimits(limits, abusers)
    assert conduct.begin("a", 0)

    assert [conduct.may_reset(0) for _ in range(3)] == [True, True, False]
    assert [conduct.may_reset(100 * S) for _ in range(3)] == [True, True, False]


def test_changes_of_settings_draw_on_the_same_allowance() -> None:
    conduct = abuse_limits(GrpcLimits(resets_burst=2 * SETTINGS_COST, resets_per_s=1))

    assert [conduct.may_set(0) for _ in range(4)] == [True, True, True, False]  # the first ones are free


def test_an_offence_is_forgotten_after_a_while() -> None:
    abusers = AbusiveAddresses(kept_s=10.0)
    abusers.add("a", 0)
    abusers.add("b", 5 * S)
    abusers.add("a", 8 * S)

    assert [abusers.has(address, 16 * S) for address in ("a", "b", "c")] == [True, False, False]


def test_the_oldest_offence_is_forgotten_beyond_the_limit() -> None:
    abusers = AbusiveAddresses(kept_s=10.0)
    for number in range(OFFENDERS_MAX + 1):
        abusers.add(str(number), number)

    assert [abusers.has(str(number), S) for number in (0, 1, OFFENDERS_MAX)] == [False, True, True]
