"""The simulated machine: one clock, one event loop, threads that take turns, and a process table.

The server reads `time`, starts `threading.Thread` and waits on `queue.SimpleQueue`; `install` replaces these names in
the standard library before the server is imported, so its code runs unchanged and pays nothing for the simulation.
Threads are greenlets: each runs until it waits. Sets of the server iterate in insertion order, since objects hash by
address. All of this holds for a whole process: only `python -m tests.simulation` calls `install`.
"""

import asyncio
import builtins
import contextvars
import ctypes
import errno
import gc
import itertools
import logging
import os
import queue
import random
import secrets
import select
import selectors
import socket
import sys
import threading
import time
import traceback
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent, greenlet

SECOND_NS = 1_000_000_000
START_NS = 1_000 * SECOND_NS
EPOCH_NS = 1_800_000_000 * SECOND_NS
"""Wall-clock time at the monotonic time 0."""

_real_pair = socket.socketpair

PROCESS: contextvars.ContextVar[str] = contextvars.ContextVar("process", default="world")
"""The simulated process that the running code belongs to."""

ROUNDS_MAX = 20_000
"""Rounds of the event loop in which no time passes; with more, something spins."""


class SpinsError(Exception):
    """The event loop is busy for ever."""


class NothingLeftError(Exception):
    """The simulation waits for something that will never happen."""


SIGNALS: dict[tuple[str, int], tuple[contextvars.Context, Callable[..., object], tuple[Any, ...]]] = {}
"""Handlers of signals, by process and number."""

DISK: dict[str, int] = {}
"""Errors of folders of the server: their paths, and numbers of the errors."""

SCHEDULED = 12
"""Events and commands of a scheduler that a failure shows."""

SCHEDULERS: dict[str, deque[tuple[int, object]]] = {}
"""The last of them, with their times, by model version and process."""


class Machine:
    """The state of the simulated machine.

    Attributes:
        now_ns: Monotonic time.
        wall_ns: Difference between wall clock and monotonic time; it may jump.
        early_ns: Time by which the timers of models end too early; negative: too late.
        late: Share of messages that processes read late.
        chance: Delays of threads and sockets.
        dead: Names of killed processes.
        unchecked: Events of schedulers until their state is checked again.
        calls: Calls of the server's processes so far that may fail, which are counted once `fails_at` is set.
        fails_at: Number of the one that does.
        failed: Called with what it was.
    """

    failed: Callable[[str], None]

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, seed: int) -> None:
        self.now_ns, self.wall_ns, self.late = START_NS, EPOCH_NS, 0.02
        self.chance = random.Random(f"machine {seed}")
        self.early_ns = self.chance.choice((0, 500_000, -2_000_000))
        self.entropy = random.Random(f"entropy {seed}")
        self.dead: set[str] = set()
        self.graveyard: list[object] = []
        self.unchecked: dict[object, int] = {}
        self.calls, self.fails_at = 0, -1
        SIGNALS.clear()
        SCHEDULERS.clear()
        DISK.clear()

    def delay_s(self, least: float, most: float) -> float:
        """Return a random time; most are near the least."""
        return least + (most - least) * self.chance.random() ** 4

    def may_fail(self, what: str, *errors: Exception) -> None:
        """Raise one of these errors if it is the turn of this call, which another machine makes fail at any time."""
        if self.fails_at < 0 or PROCESS.get().startswith(("world", "clients", "worker")):
            return
        self.calls += 1
        if self.calls == self.fails_at:
            error = errors[self.calls % len(errors)]
            vars(error)["is_intended"] = True
            self.failed(f"{what}: {error!r}")
            raise error


MACHINE = Machine()


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


_READING = ("os.scandir", "os.listdir")

_ERRORS: dict[str, tuple[int, ...]] = {
    "mmap.__new__": (errno.ENOMEM,), "socket.sendmsg": (errno.ENOBUFS,),
    "recvmsg": (errno.ECONNRESET,), "listen": (errno.EADDRINUSE,), "fork": (errno.EAGAIN,),
    **dict.fromkeys(("socketpair", "memfd_create", "dup"), (errno.EMFILE,)),
}  # fmt: skip
"""Errors of calls of the system."""


def may_fail(what: str) -> None:
    """Let a call of the system fail if it is its turn."""
    MACHINE.may_fail(what, *map(_error, _ERRORS[what]))


def _may_fail(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        may_fail(what)
        return call(*args, **options)

    return called


_NO_THREAD = "can't start new thread"


def _disk(event: str, arguments: tuple[Any, ...]) -> None:
    """Let calls of the server's processes fail."""
    if event in _ERRORS:
        may_fail(event)
    if event not in ("open", "os.rename", "os.mkdir", *_READING) or PROCESS.get() in ("world", "clients"):
        return
    path = str(arguments[0])
    if "/simulation-" in path:
        MACHINE.may_fail(f"{event} {path}", _error(errno.EIO), _error(errno.EMFILE))
    is_writing = event not in _READING and (event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR)))
    for folder, number in DISK.items():
        if path.startswith(folder) and (is_writing or number != errno.ENOSPC):
            raise OSError(number, os.strerror(number), path)


def _late_s() -> float:
    """Return how late a process may run that has something to read: sometimes others have its core."""
    return 0.2 if MACHINE.chance.random() < MACHINE.late else 3e-3


_EVENTS = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE
"""What is reported of a descriptor that has something to read, and of one that has more."""


class SimulatedLoop(asyncio.SelectorEventLoop):
    """The event loop of all simulated processes. `network` stands for the kernel's.

    It never waits: time passes instead, when nothing else is left to do. Only then it looks at descriptors, of which
    those that can be read are reported after a delay, lowest number first.
    """

    _process_events: Any  # those of the standard library that its types leave out
    _ready: Any
    _stopping: bool

    def __init__(self) -> None:
        self._poll = selectors.PollSelector()
        super().__init__(self._poll)
        self._clock_resolution = MACHINE.chance.choice((1e-9, 1e-9, 1e-3))  # timers end so much too early
        self.network: Any = None
        self.steps = 0  # callbacks since `at_step`
        self.process_of: weakref.WeakKeyDictionary[asyncio.Task[Any], str] = weakref.WeakKeyDictionary()
        self._between: Callable[[], None] | None = None  # called between two callbacks
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._due: dict[int, int] = {}  # when descriptors that can be read are reported
        self._still = (0, 0)  # time, and rounds in which it has not passed

    def _run_once(self) -> None:
        """Run what is ready; let time pass before, if nothing is."""
        ready, machine = self._ready, MACHINE
        if self._between is not None:
            self._between()
        if not ready:
            self._pass_time(machine)
        since, rounds = self._still
        self._still = (since, rounds + 1) if since == machine.now_ns else (machine.now_ns, 0)
        if rounds > ROUNDS_MAX:
            raise SpinsError
        for _ in range(1 if self._between is not None and ready else len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _pass_time(self, machine: Machine) -> None:
        """Go to the next timer, or descriptor; make their callbacks ready."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if self._stopping:
            return
        next_ns = None
        if timers:
            wait_s = timers[0][0] - self.time()
            next_ns = machine.now_ns + (int(wait_s * SECOND_NS) + 1 if wait_s > 0 else 0)
        if readable := self._poll._selector.poll(0):  # type: ignore[attr-defined]
            due = {
                fd: self._due.get(fd) or machine.now_ns + int(machine.delay_s(5e-6, _late_s()) * SECOND_NS)
                for fd, _ in sorted(readable)
            }
            next_ns = min(*due.values(), next_ns or sys.maxsize)
        if next_ns is None:
            raise NothingLeftError
        machine.now_ns = max(machine.now_ns, next_ns)
        if readable:
            found = [fd for fd, due_ns in due.items() if due_ns <= machine.now_ns]
            keys, flags = self._poll.get_map(), dict(readable)
            self._process_events([(keys[fd], _EVENTS[bool(flags[fd] & ~select.POLLIN)]) for fd in found])
            self._due = {fd: due_ns for fd, due_ns in due.items() if fd not in found}
        end_s = self.time() + self._clock_resolution
        while timers and timers[0][0] < end_s:
            self._ready.append(heappop(timers)[2])

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task = super().create_task(coro, name=name, context=context)
        self.process_of[task] = PROCESS.get() if context is None else context.get(PROCESS)
        return task

    def at_step(self, step: int, action: Callable[[], object]) -> None:
        """From now on, run one callback in each round, and an action before the one with this number."""

        def between() -> None:
            self.steps += 1
            if self.steps == step:
                action()
                self._ready.rotate(1)  # it begins at once

        self._between = between

    def time(self) -> float:
        return MACHINE.now_ns / SECOND_NS

    def call_soon(  # type: ignore[override] # any callback
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment] # any callback

    def call_at(  # type: ignore[override] # any callback
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(  # type: ignore[override] # any callback
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        if getattr(callback, "__name__", "") == "_tick":  # of a model
            delay = max(delay - MACHINE.early_ns / SECOND_NS, 0.0)
        return self.call_at(MACHINE.now_ns / SECOND_NS + delay, callback, *args, context=context)

    def run_in_executor(  # type: ignore[override] # any executor
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Run in a thread of its own, which starts a little later."""
        MACHINE.may_fail("thread", RuntimeError(_NO_THREAD))
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                outcome, settle = error, future.set_exception
            else:
                outcome, settle = result, future.set_result
            self.call_soon(lambda: None if future.done() else settle(outcome))

        thread = Thread(target=work)
        self.call_later(MACHINE.delay_s(2e-5, 5e-3), self.call_soon, _switch, thread)
        return future

    async def create_server(  # type: ignore[override] # what the server uses
        self, factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        may_fail("listen")
        return self.network.listen(factory, port, **options)

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        SIGNALS[PROCESS.get(), int(sig)] = contextvars.copy_context(), callback, args

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: threads are part of the simulation."""

    def kill(self, process: str) -> None:
        """End a simulated process as SIGKILL does: nothing of it runs again, its sockets close."""
        MACHINE.dead.add(process)

        def is_dead(handle: Any) -> bool:
            return handle._context is not None and handle._context.get(PROCESS) == process

        MACHINE.graveyard += [task for task, owner in self.process_of.items() if owner == process and not task.done()]
        ready = [handle for handle in self._ready if is_dead(handle)]
        for handle in (*ready, *(each for *_, each in self._timers if is_dead(each))):
            MACHINE.graveyard.append((handle, handle._callback, handle._args))
            handle.cancel()
        for key in list(self._poll.get_map().values()):
            if any(handle is not None and is_dead(handle) for handle in key.data):
                self._poll.unregister(key.fd)
                MACHINE.graveyard.append(key.data)
                close_under(key.fd)
        self.network.kill(process)


def close_under(fd: int) -> None:
    """Close what a descriptor refers to; the number stays taken by its owner."""
    nothing, other = _real_pair()
    os.dup2(nothing.fileno(), fd)
    nothing.close()
    other.close()


_HUB = getcurrent()


def _switch(thread: "Thread") -> None:
    if not thread.is_over and thread.process not in MACHINE.dead:
        thread.greenlet.switch()


class Thread:
    """`threading.Thread` as a greenlet of the simulated machine."""

    def __init__(
        self, group: None = None, target: Any = None, name: str = "", args: Iterable[Any] = (), kwargs: Any = None,
        *, daemon: bool | None = None,
    ) -> None:  # fmt: skip
        self.name, self.daemon, self.is_over = name, daemon, False
        self.process = PROCESS.get()

        def run() -> None:
            try:
                target(*args, **(kwargs or {}))
            finally:
                self.is_over = True

        self.greenlet = greenlet(run, parent=_HUB)
        self.greenlet.gr_context = contextvars.copy_context()
        self.greenlet.thread = self

    def start(self) -> None:
        MACHINE.may_fail("thread", RuntimeError(_NO_THREAD))
        asyncio.get_running_loop().call_soon(_switch, self)


def _this_thread(why: str) -> Thread:
    current = getcurrent()
    if current is _HUB:
        raise AssertionError(f"the event loop would block: {why}")
    return current.thread  # type: ignore[no-any-return]


class SimpleQueue:
    """`queue.SimpleQueue` between simulated threads."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Thread] = deque()

    def __class_getitem__(cls, item: object) -> type:
        return cls

    def put(self, item: object) -> None:
        self._items.append(item)
        if self._waiting:
            loop = asyncio.get_running_loop()
            loop.call_later(MACHINE.delay_s(1e-6, 2e-3), _switch, self._waiting.popleft())

    def get(self) -> Any:
        while not self._items:
            self._waiting.append(_this_thread("get"))
            _HUB.switch()
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


def _sleep(seconds: float) -> None:
    if getcurrent() is _HUB:  # in place: the event loop stands still meanwhile
        MACHINE.now_ns += int(seconds * SECOND_NS)
    else:
        asyncio.get_running_loop().call_later(seconds, _switch, _this_thread("sleep"))
        _HUB.switch()


class _OrderedMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _SET)


_SET = builtins.set


class OrderedSet(_SET, metaclass=_OrderedMeta):  # type: ignore[type-arg]
    """A set that iterates in the order in which its members came."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._order = dict.fromkeys(items)
        super().__init__(self._order)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._order)

    def add(self, item: Any) -> None:
        self._order[item] = None
        super().add(item)

    def discard(self, item: Any) -> None:
        self._order.pop(item, None)
        super().discard(item)

    def remove(self, item: Any) -> None:
        del self._order[item]
        super().remove(item)

    def pop(self) -> Any:
        item = next(iter(self._order))
        self.remove(item)
        return item

    def clear(self) -> None:
        self._order.clear()
        super().clear()

    def update(self, *others: Iterable[Any]) -> None:
        for item in (item for other in others for item in other):
            self.add(item)

    def difference_update(self, *others: Iterable[Any]) -> None:
        for item in [item for other in others for item in other]:
            self.discard(item)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def __isub__(self, other: Any) -> Any:  # type: ignore[misc]
        self.difference_update(other)
        return self


async def _wait_for(awaitable: Any, timeout: float | None) -> Any:
    """Do what `asyncio.wait_for` does since Python 3.12: no task more, which would change the order of callbacks."""
    async with asyncio.timeout(timeout):
        return await awaitable


def _replace(values: dict[Any, dict[str, Any]]) -> None:
    for module, names in values.items():
        for name, value in names.items():
            setattr(module, name, value)


def install() -> None:
    """Put the machine in place of the real one. Call it before the server is imported."""
    machine = MACHINE
    values: dict[Any, dict[str, Any]] = {
        time: {
            **dict.fromkeys(("monotonic_ns", "perf_counter_ns", "thread_time_ns"), lambda: machine.now_ns),
            **dict.fromkeys(("monotonic", "perf_counter", "process_time"), lambda: machine.now_ns / SECOND_NS),
            "time_ns": lambda: machine.now_ns + machine.wall_ns,
            "time": lambda: (machine.now_ns + machine.wall_ns) / SECOND_NS,
            "sleep": _sleep,
        },
        asyncio: {"wait_for": _wait_for},
        socket: {"socketpair": _may_fail("socketpair", socket.socketpair)},
        os: {name: _may_fail(name, getattr(os, name)) for name in ("memfd_create", "dup")},
        threading: {"Thread": Thread},
        queue: {"SimpleQueue": SimpleQueue},
        random: {"uniform": lambda least, most: least + (most - least) * machine.entropy.random()},
        secrets: {
            "token_bytes": lambda size=32: machine.entropy.randbytes(size),
            **dict.fromkeys(("token_urlsafe", "token_hex"), lambda size=32: machine.entropy.randbytes(size).hex()),
        },
        uuid: {"uuid4": lambda: uuid.UUID(int=machine.entropy.getrandbits(128), version=4)},
    }
    _replace(values)
    sys.addaudithook(_disk)
    gc.disable()  # finalizers at fixed points only


def adapt_server() -> None:
    """Replace what the server reads from the real machine, after it has been imported."""
    from charonia.server import app, engine
    from charonia.server.channel import end
    from charonia.server.execution.runner import ModelRunner
    from charonia.server.lifecycle import on_demand

    libc = SimpleNamespace(timerfd_create=lambda *_: -1)  # timers are the loop's
    values: dict[Any, dict[str, Any]] = {
        ctypes: {"CDLL": lambda *_, **__: libc},
        app: dict.fromkeys(("available_memory", "usable_memory"), lambda: 8 << 30),
        on_demand: {"tree_bytes": lambda pid=None: 1 << 30},
        end: {"receive": _may_fail("recvmsg", vars(end)["receive"])},
    }
    _replace(values)
    infer: Callable[..., Any] = engine.ModelEngine.infer

    def checked(self: Any, request: Any, reply: Callable[[Any, bool], None]) -> Any:
        """Run a request; its last response must come one time, and nothing after it."""
        has_ended = False

        def counted(outcome: Any, final: bool) -> None:
            nonlocal has_ended
            if has_ended:
                logging.getLogger("simulation").error("answered again", exc_info=AssertionError(str(outcome)[:200]))
            has_ended = has_ended or final
            reply(outcome, final)

        return infer(self, request, counted)

    engine.ModelEngine.infer = checked  # type: ignore[method-assign]
    handle: Callable[..., None] = ModelRunner._handle
    carry_out: Callable[..., None] = ModelRunner._carry_out

    def note(runner: Any, *happened: Any) -> None:
        name = f"{runner.config.name} version {runner.version} of {PROCESS.get()}"
        log = SCHEDULERS.setdefault(name, deque(maxlen=SCHEDULED))
        log.extend((MACHINE.now_ns, each) for each in happened)

    def carried_out(self: Any, commands: Any) -> None:
        note(self, *commands)
        carry_out(self, commands)

    def handled(self: Any, event: Any, now: int) -> None:
        note(self, event)
        handle(self, event, now)
        MACHINE.unchecked[self] = left = MACHINE.unchecked.get(self, 0) - 1
        if left > 0:
            return
        MACHINE.unchecked[self] = self.pending // 16  # what it costs grows with what waits
        try:
            self._scheduler.check_invariants()
        except AssertionError:
            logging.getLogger("simulation").exception("after %s, %r is out of order", event, self)

    ModelRunner._handle = handled  # type: ignore[method-assign]
    ModelRunner._carry_out = carried_out  # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        if name.startswith("charonia.server"):
            module.__dict__["set"] = OrderedSet


class Faults(logging.Handler):
    """Collects tracebacks that the server logs: each is a fault of the server's own."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []
        self.recent: deque[str] = deque(maxlen=40)

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{(MACHINE.now_ns - START_NS) / SECOND_NS:.6f} {PROCESS.get()} log: {record.getMessage()}"
        self.recent.append(text)
        error = record.exc_info[1] if record.exc_info else None
        is_disk = DISK and isinstance(error, OSError)  # as of an upgrade's order
        causes = (error, error.__cause__, error.__context__) if error is not None else ()
        if error is not None and not is_disk and not any(hasattr(each, "is_intended") for each in causes):
            frames = "".join(traceback.format_exception(error))
            self.found.append(f"the server logged an exception: {text}\n{frames}")
