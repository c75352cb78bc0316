"""The limits of the gRPC front end, and its protection from abuse: floods of pings and of cancelled calls.

A connection that exceeds them is closed. Its address is remembered for a while (`AbusiveAddresses`): the next
connections from there wait before they are read, and may cancel fewer calls in a burst. So a client gains nothing by
reconnecting, and others behind the same address only connect later.

Pure: the time is an argument. Sources: gRPC's keepalive guide for pings ("ping strikes"), CVE-2023-44487 for resets.
"""

from dataclasses import dataclass
from typing import Final

from charonia.server.grpc.http2 import Http2Settings
from charonia.server.options import CompressionLevel, GrpcOptions

MIB: Final = 1024 * 1024

SETTINGS_COST: Final = 4
"""Cancelled calls that a change of a client's HTTP/2 settings counts as."""

OFFENDERS_MAX: Final = 4096
"""Limit of remembered addresses; beyond it, the oldest is dropped."""

IDLE_PING_INTERVAL_NS: Final = 2 * 3600 * 10**9
"""Shortest interval of pings while no call is open, where pings without calls are not permitted."""

_ZLIB_LEVEL: Final = {
    CompressionLevel.NONE: 0,
    CompressionLevel.LOW: 1,
    CompressionLevel.MEDIUM: 6,
    CompressionLevel.HIGH: 9,
}


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Every limit of a gRPC front end. Times are in seconds; where noted, 0 means no limit.

    Attributes:
        message_bytes_max: Largest request message, as received and decompressed.
        compression_level: zlib level of responses to callers that accept gzip or deflate; 0 for none.
        streams_max: Limit of concurrent calls on a connection.
        header_list_bytes_max: Largest list of request headers.
        stream_window_bytes: Data that one call may send ahead; the larger, the faster large inputs come in.
        connection_window_bytes: The same for all calls of a connection.
        frame_bytes_max: Largest HTTP/2 frame received; a tensor in a single frame needs no copy.
        stream_inflight_max: Requests of one inference stream in flight; no more are read until some are answered.
        stream_unsent_bytes_max: Bytes of a stream's responses that may wait for the caller before its requests wait.
        stream_response_bytes_max: The same above which a request that sends another response fails.
        unary_unsent_bytes_max: Bytes of responses to unary calls that may wait for the windows of a connection before
            its later unary calls are deferred.
        write_buffer_bytes: Bytes in the transport's buffer at which a connection stops reading.
        resets_burst: Calls that a client may cancel in a burst on one connection.
        resets_per_s: Rate at which this allowance is refilled.
        abuser_kept_s: Time for which the address of a connection that was closed for abuse is remembered.
        abuser_wait_s: Time that a connection from such an address waits before it is read.
        connections_max: Most connections; another one is closed.
        handshake_timeout_s: Time from the connection to the client's preface and first settings.
        header_timeout_s: Time for the rest of a frame, or of headers, that a client without an open call has begun.
        body_timeout_s: Time for the rest of a message, plus its size over `body_bytes_per_s_min`.
        body_bytes_per_s_min: Slowest rate at which a message may arrive.
        keepalive_time_s: Silence after which the server sends a ping.
        keepalive_timeout_s: Time to wait for its answer before the connection is closed.
        keepalive_without_calls: Whether pings are sent and accepted while no call is open.
        pings_without_data_max: Pings sent while nothing else is; 0 for no limit.
        ping_interval_min_s: Pings of a client at shorter intervals than this while no data is sent to it are strikes.
        ping_strikes_max: Strikes after which the connection is closed; 0 for no limit.
        connection_age_max_s: Age at which the server asks the client to close a connection; 0 for none.
        connection_age_grace_s: Time that its calls then have; 0 for no limit.
        connection_idle_max_s: Time without a call after which the server asks the client to close; 0 for none.
    """

    message_bytes_max: int = 2**31 - 1
    compression_level: int = 0
    streams_max: int = 1024
    header_list_bytes_max: int = 16 * 1024
    stream_window_bytes: int = 8 * MIB
    connection_window_bytes: int = 64 * MIB
    frame_bytes_max: int = MIB
    stream_inflight_max: int = 256
    stream_unsent_bytes_max: int = 16 * MIB
    stream_response_bytes_max: int = 256 * MIB
    unary_unsent_bytes_max: int = 64 * MIB
    write_buffer_bytes: int = 4 * MIB
    resets_burst: int = 4096
    resets_per_s: int = 512
    abuser_kept_s: float = 10.0
    abuser_wait_s: float = 1.0
    connections_max: int = 16_384
    handshake_timeout_s: float = 20.0
    header_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    body_bytes_per_s_min: int = 4096
    keepalive_time_s: float = 7200.0
    keepalive_timeout_s: float = 20.0
    keepalive_without_calls: bool = False
    pings_without_data_max: int = 2
    ping_interval_min_s: float = 300.0
    ping_strikes_max: int = 2
    connection_age_max_s: float = 0.0
    connection_age_grace_s: float = 0.0
    connection_idle_max_s: float = 600.0

    @classmethod
    def of(cls, options: GrpcOptions) -> "GrpcLimits":
        return cls(
            message_bytes_max=options.input_bytes_max,
            connections_max=options.connections_max,
            compression_level=_ZLIB_LEVEL[options.response_compression],
            keepalive_time_s=options.keepalive_time_ms / 1e3,
            keepalive_timeout_s=options.keepalive_timeout_ms / 1e3,
            keepalive_without_calls=options.keepalive_permit_without_calls,
            pings_without_data_max=options.http2_max_pings_without_data,
            ping_interval_min_s=options.http2_min_recv_ping_interval_without_data_ms / 1e3,
            ping_strikes_max=options.http2_max_ping_strikes,
            connection_age_max_s=options.max_connection_age_ms / 1e3,
            connection_age_grace_s=options.max_connection_age_grace_ms / 1e3,
        )

    @property
    def http2(self) -> Http2Settings:
        """HTTP/2 settings of a connection."""
        return Http2Settings(
            concurrent_streams_max=self.streams_max,
            stream_window_bytes=self.stream_window_bytes,
            connection_window_bytes=self.connection_window_bytes,
            frame_bytes_max=self.frame_bytes_max,
            header_list_bytes_max=self.header_list_bytes_max,
            resets_burst=self.resets_burst,
            resets_per_s=self.resets_per_s,
        )


class AbusiveAddresses:
    """The addresses whose connections were closed for abuse a short time ago."""

    def __init__(self, kept_s: float) -> None:
        self._kept_ns = int(kept_s * 1e9)
        self._until_ns: dict[str, int] = {}

    def add(self, address: str, now_ns: int) -> None:
        """Remember an address: a connection from there is closed for abuse."""
        self._until_ns.pop(address, None)
        if len(self._until_ns) >= OFFENDERS_MAX:
            del self._until_ns[next(iter(self._until_ns))]
        self._until_ns[address] = now_ns + self._kept_ns

    def has(self, address: str, now_ns: int) -> bool:
        return self._until_ns.get(address, 0) > now_ns


class AbuseLimits:
    """Counts the pings and resets of one client, which cost the server more than the client.

    Attributes:
        has_settings: Whether the client has sent its first settings.
    """

    def __init__(self, limits: GrpcLimits, abusers: AbusiveAddresses) -> None:
        self._limits = limits
        self._abusers = abusers
        self._address = ""
        self._strikes = 0
        self._sends = 0
        self._last_ping_ns: int | None = None
        self._burst = self._resets = float(limits.resets_burst)
        self.has_settings = False
        self._reset_ns = 0

    def begin(self, address: str, now_ns: int) -> bool:
        """Note the client's address, "" for none; return whether it is an offender's.

        An offender has a smaller burst of cancelled calls: the allowance of a second.
        """
        self._address = address
        is_offender = self._abusers.has(address, now_ns)
        if is_offender:
            self._burst = self._resets = float(min(self._limits.resets_per_s, self._limits.resets_burst))
        return is_offender

    def record_abuse(self, now_ns: int) -> None:
        if self._address:
            self._abusers.add(self._address, now_ns)

    def may_ping(self, now_ns: int, sends: int, *, has_calls: bool) -> bool:
        """Count a ping; return whether the connection may stay open.

        Args:
            now_ns: Monotonic time, in ns.
            sends: Number of sends to the client so far; a ping after a new one is legitimate.
            has_calls: Whether a call is open.
        """
        limits = self._limits
        interval_ns = int(limits.ping_interval_min_s * 1e9)
        if not has_calls and not limits.keepalive_without_calls:
            interval_ns = IDLE_PING_INTERVAL_NS
        if sends != self._sends:
            self._sends = sends
            self._strikes = 0
        elif self._last_ping_ns is not None and now_ns - self._last_ping_ns < interval_ns:
            self._strikes += 1
        self._last_ping_ns = now_ns
        return limits.ping_strikes_max == 0 or self._strikes <= limits.ping_strikes_max

    def may_reset(self, now_ns: int, cost: int = 1) -> bool:
        """Count a cancelled call; return whether the connection may stay open."""
        refill = (now_ns - self._reset_ns) / 1e9 * self._limits.resets_per_s
        self._reset_ns = now_ns
        self._resets = min(self._resets + refill, self._burst) - cost
        return self._resets >= 0

    def may_set(self, now_ns: int) -> bool:
        """Count a change of the client's settings; return whether the connection may stay open."""
        if not self.has_settings:  # each client sends some at first
            self.has_settings = True
            return True
        return self.may_reset(now_ns, SETTINGS_COST)
