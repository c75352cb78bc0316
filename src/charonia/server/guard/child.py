"""A process of a server, as the guard knows it. Pure."""

from enum import Enum

from charonia.server.guard.events import ProcessRole

NS_PER_S = 1_000_000_000

RESTART_DELAY_NS = NS_PER_S // 20
"""Back-off before the first restart."""

ENGINE_RESTART_DELAY_NS_MAX = 30 * NS_PER_S
FRONT_END_RESTART_DELAY_NS_MAX = NS_PER_S

HEALTHY_NS = 60 * NS_PER_S
"""A process that was ready for this long begins with the first back-off again."""


class State(Enum):
    """State of a process."""

    IDLE = "not started"
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting to restart"
    DONE = "done"


class Child:
    """A process: its state, and its times in ns.

    Args:
        slot: Name of the first front end with its sockets; all engines have the same.
        number: Counts the processes of a slot, from 1 on.
    """

    __slots__ = (
        "again_ns",
        "ends",
        "heartbeat_ns",
        "is_asked_to_stop",
        "is_hung",
        "is_leaving",
        "is_too_large",
        "kill_ns",
        "last_exit",
        "name",
        "number",
        "pid",
        "ready_ns",
        "restarts",
        "role",
        "slot",
        "start_failures",
        "started_ns",
        "state",
    )

    def __init__(self, name: str, role: ProcessRole, slot: str = "", number: int = 1) -> None:
        self.name = name
        self.role = role
        self.slot = slot or (ProcessRole.ENGINE.value if role is ProcessRole.ENGINE else name)
        self.number = number
        self.state = State.IDLE
        self.pid = 0  # while it runs
        self.started_ns = self.ready_ns = self.heartbeat_ns = self.again_ns = 0
        self.kill_ns: int | None = None
        self.ends = 0  # since the last healthy stretch
        self.start_failures = 0  # in a row
        self.is_hung = self.is_too_large = self.is_asked_to_stop = False
        self.is_leaving = False  # it accepts no more connections
        self.restarts: dict[str, int] = {}
        self.last_exit = ""

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not exited."""
        return self.state in (State.STARTING, State.READY)

    @property
    def accepts(self) -> bool:
        """Whether it accepts connections, or is about to."""
        return self.is_alive and not self.is_leaving

    def successor(self) -> "Child":
        """Return a front end for the same sockets."""
        number = self.number + 1
        made = Child(f"{self.slot}_{number}", self.role, self.slot, number)
        made.restarts, made.last_exit = self.restarts, self.last_exit
        return made

    def restart_delay_ns(self) -> int:
        """Return the back-off before its restart."""
        limit = ENGINE_RESTART_DELAY_NS_MAX if self.role is ProcessRole.ENGINE else FRONT_END_RESTART_DELAY_NS_MAX
        return min(RESTART_DELAY_NS << min(self.ends, 32), limit)

    def begin(self, now_ns: int) -> None:
        """It is about to be started."""
        if self.state is State.WAITING:
            self.restarts[self.last_exit] = self.restarts.get(self.last_exit, 0) + 1
        self.state = State.STARTING
        self.started_ns = now_ns
        self.is_hung = self.is_too_large = self.is_leaving = False

    def end(self, reason: str, now_ns: int) -> int:
        """It has ended; return its uptime."""
        was_ready = self.state is State.READY
        if was_ready and now_ns - self.ready_ns >= HEALTHY_NS:
            self.ends = 0
        self.start_failures = 0 if was_ready else self.start_failures + 1
        self.state = State.DONE
        self.pid = 0
        self.kill_ns = None
        self.last_exit = reason
        return now_ns - self.started_ns
