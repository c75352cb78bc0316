"""Whether a client behaves: how often it pings and how many calls it cancels.

Pure: the time is an argument. Sources: gRPC's keepalive guide for pings ("ping strikes"), CVE-2023-44487 for resets.
"""

from charonia.server.grpc.limits import GrpcLimits

IDLE_PING_INTERVAL_NS = 2 * 3600 * 10**9
"""Least time between pings while no call is open, where pings without calls are not permitted."""


class Conduct:
    """What one client did lately."""

    __slots__ = ("_last_ping_ns", "_limits", "_reset_ns", "_resets", "_sends", "_strikes")

    def __init__(self, limits: GrpcLimits) -> None:
        self._limits = limits
        self._strikes = 0
        self._sends = 0
        self._last_ping_ns: int | None = None
        self._resets = float(limits.resets_burst)
        self._reset_ns = 0

    def may_ping(self, now_ns: int, sends: int, *, has_calls: bool) -> bool:
        """Note a ping; return whether the client may stay.

        Args:
            now_ns: Monotonic time, in ns.
            sends: How often something was sent to the client so far: a ping after that is no waste.
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

    def may_reset(self, now_ns: int) -> bool:
        """Note a cancelled call; return whether the client may stay."""
        refill = (now_ns - self._reset_ns) / 1e9 * self._limits.resets_per_s
        self._reset_ns = now_ns
        self._resets = min(self._resets + refill, float(self._limits.resets_burst)) - 1
        return self._resets >= 0
