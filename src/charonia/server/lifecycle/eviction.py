"""Which loaded models make room for one that is needed, and when one that failed is tried again. Pure.

Pure: it knows sizes, times and who is busy; times are arguments, in ns. Rules:

1. A model with requests in flight is never unloaded, nor one that is pinned or held (needed by who waits).
2. Of the others the least recently used go first, no more of them than it takes.
3. A model that others are made of goes after them, and counts as busy and as pinned when one of them is.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

BACK_OFF_NS = 1_000_000_000
"""Time after a first failure until a model is tried again; it doubles with each one that follows."""

BACK_OFF_NS_MAX = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Resident:
    """A loaded model.

    Attributes:
        size: Bytes of memory that it takes.
        used_ns: When it was last used, or loaded.
        is_busy: Whether it has requests in flight.
        is_pinned: Whether it stays whatever happens.
        made_of: Keys of the models that it consists of, for an ensemble.
    """

    size: int
    used_ns: int
    is_busy: bool = False
    is_pinned: bool = False
    made_of: tuple[str, ...] = ()


class Fit(Enum):
    """Whether there is room."""

    FITS = "fits"
    """Once the models of `EvictionPlan.evict` are unloaded."""

    LATER = "later"
    """Models in flight are in the way: there may be room when they are idle."""

    NEVER = "never"
    """What stays whatever happens leaves no room."""


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """The answer to a wish for memory.

    Attributes:
        verdict: Whether there is room.
        evict: Keys of the models to unload first, in this order.
        stays: Bytes of the models that cannot be unloaded at all.
    """

    verdict: Fit
    evict: tuple[str, ...] = ()
    stays: int = 0


def make_room(
    residents: Mapping[str, Resident], budget: int, needed: int, *, held: Collection[str] = ()
) -> EvictionPlan:
    """Decide which models go so that `needed` more bytes fit.

    Args:
        residents: The loaded models by key.
        budget: Bytes that all may take together.
        needed: Bytes that are to be free.
        held: Keys of models that must stay, because who needs the memory needs them too.
    """
    limit = budget - needed
    total = sum(resident.size for resident in residents.values())
    fixed = _with_parts((k for k, r in residents.items() if r.is_pinned or k in held), residents)
    stays = sum(residents[key].size for key in fixed)
    if stays > limit:
        return EvictionPlan(Fit.NEVER, stays=stays)
    busy = _with_parts((k for k, r in residents.items() if r.is_busy), residents)
    evict: list[str] = []
    idle = [key for key in residents if key not in fixed and key not in busy]
    for key in sorted(idle, key=lambda key: (residents[key].used_ns, key)):
        if total <= limit:
            break
        if not residents[key].size or key in evict:
            continue
        # Those that are made of it cannot answer without it. None of them is busy or fixed, or it would be, too.
        gone = [each for each in (*_users(key, residents), key) if each not in evict]
        evict += gone
        total -= sum(residents[each].size for each in gone)
    if total > limit:
        return EvictionPlan(Fit.LATER, stays=stays)
    return EvictionPlan(Fit.FITS, tuple(evict), stays)


def _with_parts(keys: Iterable[str], residents: Mapping[str, Resident]) -> set[str]:
    """Return these models and what they are made of, and so on."""
    found: set[str] = set()
    left = list(keys)
    while left:
        key = left.pop()
        if key in residents and key not in found:
            found.add(key)
            left += residents[key].made_of
    return found


def _users(key: str, residents: Mapping[str, Resident]) -> list[str]:
    """Return the models that are made of one, directly or not, outermost first."""
    users: list[str] = []
    reached = [key]
    while reached:
        part = reached.pop(0)
        for user, resident in residents.items():
            if part in resident.made_of and user not in users and user != key:
                users.append(user)
                reached.append(user)
    return users[::-1]


@dataclass(slots=True)
class _Failure:
    reason: Exception
    state: object
    count: int
    until_ns: int


class BackOff:
    """Models that could not be loaded, and until when they are not tried again."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def failed(self, key: str, reason: Exception, state: object, now_ns: int) -> None:
        """Take in a failure.

        Args:
            key: The model.
            reason: Why.
            state: What its files were: with others it is tried again at once.
            now_ns: Now.
        """
        before = self._failures.get(key)
        count = before.count + 1 if before is not None and before.state == state else 1
        pause = min(BACK_OFF_NS << min(count - 1, 16), BACK_OFF_NS_MAX)
        self._failures[key] = _Failure(reason, state, count, now_ns + pause)

    def loaded(self, key: str) -> None:
        """Take in that a model was loaded."""
        self._failures.pop(key, None)

    def reason(self, key: str, state: object, now_ns: int) -> tuple[Exception, int] | None:
        """Return why a model is not tried now and for how many ns; None when it may be."""
        failure = self._failures.get(key)
        if failure is None or failure.state != state or now_ns >= failure.until_ns:
            return None
        return failure.reason, failure.until_ns - now_ns

    def keep(self, keys: Collection[str]) -> None:
        """Forget the failures of all other models."""
        self._failures = {key: failure for key, failure in self._failures.items() if key in keys}
