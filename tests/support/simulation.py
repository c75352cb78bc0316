"""A scheduler, slots and clients in simulated time: no thread, no sleep, the same result every time.

The simulation takes the place of the engine: it passes events on, acts as the slots, sends `Tick` exactly at `wake_at`.
"""

from collections.abc import Callable
from heapq import heappop, heappush

from charonia.server.scheduling.api import Drop, DropReason, Event, Run, Scheduler, SlotIdle, Submit, Tick

ServiceTime = Callable[[Run], int]
"""How long a slot works on a batch, in ns, at least 1."""

Listener = Callable[[int, int], None]
"""Told an id and the time at which its request was finished or dropped."""


class Simulation:
    """Drives one scheduler.

    Attributes:
        runs: When each batch started, and the batch.
        submitted_ns: When each request was submitted, by id.
        started_ns: When each request started to run, by id.
        finished_ns: When each request was finished, by id.
        dropped: When and why requests were refused, by id.
    """

    def __init__(
        self, scheduler: Scheduler, service_ns: ServiceTime, *, slots: int = 1, on_left: Listener | None = None
    ) -> None:
        self._scheduler = scheduler
        self._service_ns = service_ns
        self._on_left = on_left
        self._agenda: list[tuple[int, int, Event]] = []  # heap of (time, order of planning, event)
        self._planned = 0
        self._running: dict[int, Run] = {}
        self.now_ns = 0
        self.runs: list[tuple[int, Run]] = []
        self.submitted_ns: dict[int, int] = {}
        self.started_ns: dict[int, int] = {}
        self.finished_ns: dict[int, int] = {}
        self.dropped: dict[int, tuple[int, DropReason]] = {}
        for slot in range(slots):
            self.at(0, SlotIdle(slot))

    def at(self, time_ns: int, event: Event) -> None:
        """Plan an event. Events of the same time happen in the order in which they were planned."""
        self._planned += 1
        heappush(self._agenda, (time_ns, self._planned, event))

    def run(self, until_ns: int | None = None) -> None:
        """Let everything happen that is planned or follows from it, up to and including `until_ns` where given."""
        while True:
            wake_ns = self._scheduler.wake_at()
            if wake_ns is not None and (not self._agenda or wake_ns < self._agenda[0][0]):
                time_ns, event = wake_ns, None
            elif self._agenda:
                time_ns, event = self._agenda[0][0], self._agenda[0][2]
            else:
                return
            if until_ns is not None and time_ns > until_ns:
                return
            if event is not None:
                heappop(self._agenda)
            self.now_ns = time_ns
            self._happen(Tick() if event is None else event)

    def _happen(self, event: Event) -> None:
        if isinstance(event, SlotIdle) and event.slot in self._running:
            for request_id in self._running.pop(event.slot).ids:
                self.finished_ns[request_id] = self.now_ns
                self._left(request_id)
        elif isinstance(event, Submit):
            self.submitted_ns[event.id] = self.now_ns
        for command in self._scheduler.handle(event, self.now_ns):
            if isinstance(command, Drop):
                self.dropped[command.id] = (self.now_ns, command.reason)
                self._left(command.id)
            else:
                self._start(command)

    def _start(self, run: Run) -> None:
        self.runs.append((self.now_ns, run))
        self._running[run.slot] = run
        self.started_ns.update(dict.fromkeys(run.ids, self.now_ns))
        self.at(self.now_ns + self._service_ns(run), SlotIdle(run.slot))

    def _left(self, request_id: int) -> None:
        if self._on_left is not None:
            self._on_left(request_id, self.now_ns)
