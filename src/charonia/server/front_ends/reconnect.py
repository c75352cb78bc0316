"""How a front end handles requests while the engine is being restarted or replaced. Pure.

Requests that arrive in the first seconds of an absence are held, and sent in their order when the engine is back. After
that, or when too many wait, they are refused immediately. Requests in flight when the engine exited are not repeated,
because they may have had effects. Open sequences have lost their state, and their next request gets an error.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from charonia.core.errors import ServingError, unavailable

NS_PER_S = 1_000_000_000

HOLD_NS_MAX = 10 * NS_PER_S
"""Time from the beginning of an absence in which requests are held."""

HELD_MAX = 1024
"""Requests of one front end that are held."""

HELD_BYTES_MAX = 256 * 2**20
"""Bytes of their tensors together."""

SEQUENCES_MAX = 16_384
"""Limit of remembered open sequences; beyond it, the oldest are dropped, and their loss has another error."""

AWAY = "the engine is being started again"
_AWAY_HINT = "try again in a moment"


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to the engine has ended."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The engine is there, and its models are known."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A request came while the engine was away."""

    id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client of a request has left, or the request is over."""

    id: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The front end takes no more requests."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Lost | Connected | Submit | Cancel | Leave | Tick


@dataclass(frozen=True, slots=True)
class Send:
    """Send a held request to the engine."""

    id: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a request with an error."""

    id: int
    error: ServingError


Command = Send | Refuse


class Reconnect:
    """The requests that wait for the engine. It begins connected."""

    def __init__(self) -> None:
        self._disconnected_ns: int | None = None  # when the absence began
        self._is_leaving = False
        self._held: dict[int, int] = {}  # bytes by id, in their order
        self._held_bytes = 0

    @property
    def is_disconnected(self) -> bool:
        return self._disconnected_ns is not None

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take an event and return what to do, in this order."""
        match event:
            case Lost() if self._disconnected_ns is None:
                self._disconnected_ns = now_ns
            case Connected():
                self._disconnected_ns = None
                return [Send(each) for each in self._release()]
            case Submit(id, size_bytes):
                return self._submit(id, size_bytes, now_ns)
            case Cancel(id):
                self._held_bytes -= self._held.pop(id, 0)
            case Leave():
                self._is_leaving = True
                return self._refuse_all()
        wake_at = self.wake_at()
        return self._refuse_all() if wake_at is not None and wake_at <= now_ns else []

    def wake_at(self) -> int | None:
        """Return when to call `handle` with a `Tick` if nothing happens before."""
        return self._disconnected_ns + HOLD_NS_MAX if self._disconnected_ns is not None and self._held else None

    def _submit(self, id: int, size_bytes: int, now_ns: int) -> list[Command]:
        if self._disconnected_ns is None:
            return [Send(id)]
        if self._is_leaving or now_ns >= self._disconnected_ns + HOLD_NS_MAX:
            return [Refuse(id, _refusal())]
        if len(self._held) >= HELD_MAX or self._held_bytes + size_bytes > HELD_BYTES_MAX:
            return [Refuse(id, unavailable(f"{AWAY}, and {len(self._held)} requests wait for it", hint=_AWAY_HINT))]
        self._held[id] = size_bytes
        self._held_bytes += size_bytes
        return []

    def _refuse_all(self) -> list[Command]:
        return [Refuse(each, _refusal()) for each in self._release()]

    def _release(self) -> Iterator[int]:
        held, self._held = self._held, {}
        self._held_bytes = 0
        return iter(held)


def _refusal() -> ServingError:
    return unavailable(AWAY, hint=_AWAY_HINT)


def interrupted() -> ServingError:
    return unavailable(
        "the engine ended before the request was answered", hint="send it again if it may run a second time"
    )


Sequence = tuple[str, int | str]
"""A sequence: its model and its id."""


class OpenSequences:
    """The open sequences of this front end, and the sequences lost with an engine."""

    def __init__(self) -> None:
        self._open: dict[Sequence, None] = {}
        self._lost: dict[Sequence, None] = {}

    def sent(self, sequence: Sequence, *, starts: bool, ends: bool) -> ServingError | None:
        """Note a request of a sequence before it is sent; return the error if the sequence was lost.

        It returns the error one time. After that, the engine reports an unknown sequence.
        """
        was_lost = sequence in self._lost
        self._lost.pop(sequence, None)
        if was_lost and not starts:
            model, key = sequence
            return unavailable(
                f"sequence {key} of model '{model}' was lost: the engine that had its state has ended",
                hint="begin the sequence again, with sequence_start",
            )
        if ends:
            self._open.pop(sequence, None)
        else:
            self._open[sequence] = None
            if len(self._open) > SEQUENCES_MAX:
                del self._open[next(iter(self._open))]
        return None

    def mark_lost(self, sequences: Iterable[Sequence]) -> None:
        self._lost |= dict.fromkeys(sequences)

    def engine_ended(self) -> None:
        """Note that the state of all open sequences is lost."""
        self._lost |= self._open
        self._open = {}
        for _ in range(len(self._lost) - SEQUENCES_MAX):
            del self._lost[next(iter(self._lost))]
