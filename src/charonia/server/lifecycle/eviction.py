"""Which loaded models are evicted for one that is needed, and the back-off after a failed load. Pure.

Times are arguments, in ns. Rules:

1. A model with requests in flight is never evicted, nor one that is pinned or held (needed by a load under way).
2. Of the others, the least recently used are evicted first, and no more than necessary.
3. A model of an ensemble is evicted after the ensemble, and counts as busy and as pinned when the ensemble is.
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
        is_pinned: Whether it must never be evicted.
        made_of: Keys of the models of its steps, for an ensemble.
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
    """Busy models take the memory: there may be room when they are idle."""

    NEVER = "never"
    """The pinned and held models leave no room."""


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """The answer to a request for memory.

    Attributes:
        verdict: Whether there is room.
        evict: Keys of the models to unload first, in this order.
        stays: Bytes of the models that cannot be evicted at all.
    """

    verdict: Fit
    evict: tuple[str, ...] = ()
    stays: int = 0


def make_room(
    residents: Mapping[str, Resident], budget: int, needed: int, *, held: Collection[str] = ()
) -> EvictionPlan:
    """Decide which models to evict so that `needed` more bytes fit.

    Args:
        residents: The loaded models by key.
        budget: Bytes that all may take together.
        needed: Bytes to free.
        held: Keys of models that must stay because the new model or its caller needs them, too.
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
        # Its ensembles cannot answer without it. None of them is busy or fixed, or the model would be, too.
        gone = [each for each in (*_users(key, residents), key) if each not in evict]
        evict += gone
        total -= sum(residents[each].size for each in gone)
    if total > limit:
        return EvictionPlan(Fit.LATER, stays=stays)
    return EvictionPlan(Fit.FITS, tuple(evict), stays)


def idle_since(residents: Mapping[str, Resident], since_ns: int) -> list[str]:
    """Return the models that are not busy and were not used after `since_ns`, ensembles before their models.

    A model that is pinned, or a part of an ensemble that stays, is not among them.
    """
    stays = _with_parts(
        (k for k, r in residents.items() if r.is_busy or r.is_pinned or r.used_ns > since_ns), residents
    )
    idle = [key for key in residents if key not in stays]
    return list(dict.fromkeys(each for key in idle for each in (*_users(key, residents), key)))


def _with_parts(keys: Iterable[str], residents: Mapping[str, Resident]) -> set[str]:
    """Return these models and, recursively, the models that they are made of."""
    found: set[str] = set()
    left = list(keys)
    while left:
        key = left.pop()
        if key in residents and key not in found:
            found.add(key)
            left += residents[key].made_of
    return found


def _users(key: str, residents: Mapping[str, Resident]) -> list[str]:
    """Return the ensembles that contain a model, directly or indirectly, outermost first."""
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
    reason: str
    state: object
    count: int
    until_ns: int


class BackOff:
    """The models whose load failed, and when each may be tried again."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def failed(self, key: str, reason: str, state: object, now_ns: int) -> None:
        """Record a failure.

        Args:
            key: The model.
            reason: Why; its text, since an exception keeps the requests that it has passed.
            state: The fingerprint of its files: when it changes, the model may be tried again immediately.
            now_ns: Now.
        """
        before = self._failures.get(key)
        count = before.count + 1 if before is not None and before.state == state else 1
        pause = min(BACK_OFF_NS << min(count - 1, 16), BACK_OFF_NS_MAX)
        self._failures[key] = _Failure(reason, state, count, now_ns + pause)

    def loaded(self, key: str) -> None:
        self._failures.pop(key, None)

    def reason(self, key: str, state: object, now_ns: int) -> tuple[str, int] | None:
        """Return why a model must not be tried now and for how many ns; None when it may be."""
        failure = self._failures.get(key)
        if failure is None or failure.state != state or now_ns >= failure.until_ns:
            return None
        return failure.reason, failure.until_ns - now_ns

    def keep(self, keys: Collection[str]) -> None:
        self._failures = {key: failure for key, failure in self._failures.items() if key in keys}
