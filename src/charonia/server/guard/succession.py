"""How front ends succeed one another on the same listening sockets. Pure.

A renewal replaces one after the other: it starts the successor, and when that is ready, it stops the previous one,
which accepts no more connections, completes its requests, and exits. A successor that cannot start changes nothing. A
front end that leaves without an order of the guard gets a successor immediately.
"""

from dataclasses import dataclass

from charonia.server.guard.child import NS_PER_S, Child, State
from charonia.server.guard.events import (
    Command,
    Forget,
    ProcessRole,
    ReportUpgrade,
    Stage,
    Start,
    Succeed,
    Terminate,
)

FRONT_END_STOP_MARGIN_NS = 5 * NS_PER_S
"""Time beyond the exit timeout after which the guard kills a stopping front end."""

FINISH_NS = 300 * NS_PER_S
"""Default of the time that a replaced process has to complete its requests."""

FINISH_NS_MIN = 2 * NS_PER_S
"""Shortest time for a front end: clients have to learn that they must reconnect."""

RENEWED = "renewed"
"""Reason for which a front end was started in the place of another one."""


@dataclass(slots=True)
class _Renewal:
    """A renewal under way."""

    slots: list[str]  # those to come
    finish_ns: int


class Succession:
    """The front ends among the processes of a server.

    Args:
        children: The processes by name; successors are added, and removed with their predecessors.
        exit_timeout_ns: Time that a front end takes to end when its time to finish is over.
    """

    def __init__(self, children: dict[str, Child], exit_timeout_ns: int) -> None:
        self._children = children
        self._slots = [child.slot for child in self.all()]
        self._exit_timeout_ns = exit_timeout_ns
        self._renewal: _Renewal | None = None

    @property
    def are_renewed(self) -> bool:
        return self._renewal is not None

    def all(self) -> list[Child]:
        return [child for child in self._children.values() if child.role is ProcessRole.FRONT_END]

    def renew(self, finish_ns: int) -> None:
        """Begin a renewal with the next `step`; the previous front ends have this time to finish."""
        self._renewal = _Renewal(list(self._slots), max(finish_ns, FINISH_NS_MIN))

    def step(self, now_ns: int) -> list[Command]:
        """Renew the next front end when all others are ready. One that is about to be started again is new then."""
        renewal, front_ends = self._renewal, self.all()
        if renewal is None or any(child.state is State.STARTING for child in front_ends):
            return []
        while renewal.slots:
            slot = renewal.slots.pop(0)
            for child in front_ends:
                if child.slot == slot and child.accepts:
                    return self._succeed(child, now_ns)
        if any(child.is_leaving for child in front_ends):
            return []
        self._renewal = None
        return [ReportUpgrade(Stage.SETTLED, "", 0)]

    def take_over(self, child: Child, now_ns: int) -> list[Command]:
        """Stop the previous front end: its successor is ready for the first time."""
        child.restarts[RENEWED] = child.restarts.get(RENEWED, 0) + 1
        child.last_exit = RENEWED
        finish_ns = self._renewal.finish_ns if self._renewal is not None else FINISH_NS
        commands: list[Command] = []
        for former in self._beside(child):
            if former.accepts:
                self._leaves(former, finish_ns, now_ns)
                commands.append(Terminate(former.name, finish_ns))
        if self._renewal is not None:
            commands.append(ReportUpgrade(Stage.RENEWED, child.name, child.pid))
        return commands

    def left(self, child: Child, now_ns: int, *, may_succeed: bool) -> list[Command]:
        """A front end accepts no more connections without an order of the guard: it needs a successor."""
        if not may_succeed:  # the stop kills it in time
            child.is_leaving = True
            return []
        self._leaves(child, FINISH_NS, now_ns)
        return [] if self._is_succeeded(child) else self._succeed(child, now_ns)

    def leave_all(self, now_ns: int) -> list[Command]:
        """Stop all front ends that accept connections; their successors listen when there is an engine again."""
        commands: list[Command] = []
        for child in self.all():
            if child.accepts and child.state is State.READY:
                self._leaves(child, FINISH_NS, now_ns)
                commands.append(Terminate(child.name, FINISH_NS))
                if not self._is_succeeded(child):
                    commands += self._succeed(child, now_ns)
        return commands

    def ended(self, child: Child, pid: int) -> list[Command]:
        """Remove a front end that has exited beside its successor, or before it could take over.

        Returns:
            Nothing if it is neither, and has to be started again.
        """
        commands: list[Command] = [Forget(child.name)]
        if not self._is_succeeded(child):
            if not any(former.accepts for former in self._beside(child)):
                return []
            self._renewal = None
            commands.append(ReportUpgrade(Stage.NOT_RENEWED, child.name, pid, child.last_exit))
        del self._children[child.name]
        return commands

    def shown(self, child: Child) -> str:
        """Return the name of a front end in the record: that of the first one with its sockets, if it is the one."""
        if child.is_leaving and self._is_succeeded(child):
            return f"former_{child.name}"
        is_next = any(other.number < child.number and other.accepts for other in self._beside(child))
        return f"next_{child.slot}" if is_next else child.slot

    def _succeed(self, former: Child, now_ns: int) -> list[Command]:
        following = former.successor()
        self._children[following.name] = following
        following.begin(now_ns)
        return [Succeed(following.name, former.name), Start(following.name)]

    def _leaves(self, former: Child, finish_ns: int, now_ns: int) -> None:
        former.is_leaving = True
        former.kill_ns = now_ns + finish_ns + self._exit_timeout_ns + FRONT_END_STOP_MARGIN_NS

    def _is_succeeded(self, child: Child) -> bool:
        return any(other.number > child.number for other in self._beside(child))

    def _beside(self, child: Child) -> list[Child]:
        return [other for other in self.all() if other.slot == child.slot and other is not child]
