"""The statistical tests of canary plans. Pure.

Errors and differences are tested after every window, latency whenever the sample has doubled. All tests hold for any
number of looks: a canary that is as good fails each with at most the probability that the test is given.

- Errors: given the requests of both versions in a window and how many of all failed, the errors of a canary that is as
  good follow Fisher's distribution, whatever the rate is. A bet on more of them, at fair odds, is an e-process: it
  multiplies its stake by x with probability 1/x at most, ever. Where requests are few, windows are joined until both
  versions can be expected to have some. That must not depend on which version got them: windows that end when both
  have some are not fair bets.
- Differences: the same with the binomial distribution at the highest rate that is permitted.
- As long as a canary is good, bets lose. A part of the stake is kept back and bet anew when the previous bet is nearly
  lost, so a canary that turns bad after a day is found as one that is bad from the beginning, only later by
  some errors.
- Latency: a bound of each p99 from the ranks of the sample, which needs no assumption on how latencies are distributed.
  The looks share the probability, 1/2, 1/6, 1/12 and so on of it.

Sources: J. Ville, Étude critique de la notion de collectif, 1939 (the limit of a fair bet); R. A. Fisher, exact test;
H. A. David and H. N. Nagaraja, Order Statistics, section 7.1 (ranks as bounds of quantiles).
"""

from collections.abc import Sequence
from math import exp, inf, log, log1p

import numpy as np
from numpy.typing import NDArray

from charonia.core.latency import LatencyHistogram
from charonia.server.traffic.figures import RequestWindow

ODDS = (1.5, 2.0, 4.0, 16.0, 256.0)
"""The bets: on odds of an error, or a difference, that are this many times higher. A canary that is worse by another
factor is found, too, only later."""

EXPECTED_MIN = 4
"""Requests that the version with fewer of them has on average in a window whose errors are compared."""

LOST = 0.1
"""Bets that are worth less than this share of the next part of the stake are joined by that part."""

LATENCIES_MIN = 50
"""Smallest sample of the canary whose p99 is compared."""

_TAIL = 0.01
"""Share of a sample above its p99."""


class _Stake:
    """A stake of 1, of which parts are bet on `ODDS`, equally on each: 1/2, 1/6, 1/12 and so on."""

    def __init__(self) -> None:
        self._parts = 1
        self._bets = [log(0.5)] * len(ODDS)

    @property
    def worth(self) -> float:
        """Its present value, with the part kept back: by mere chance, x or more with probability 1/x at most."""
        return _mean(self._bets) + 1 / (self._parts + 1)

    def multiply(self, logarithms: Sequence[float]) -> None:
        """Multiply each bet; the factors, given as logarithms, have the mean 1 if the canary is as good."""
        self._bets = [bet + each for bet, each in zip(self._bets, logarithms, strict=True)]
        part = 1 / ((self._parts + 1) * (self._parts + 2))
        if _mean(self._bets) < LOST * part:
            self._parts += 1
            self._bets = [float(np.logaddexp(bet, log(part))) for bet in self._bets]


class ErrorTest:
    """Whether requests of the canary fail more often than requests of the stable version."""

    def __init__(self) -> None:
        self._stake = _Stake()
        self._window_min = 0.0
        self._canary = self._stable = (0, 0)  # requests and errors of the windows that are joined

    @property
    def evidence(self) -> float:
        """The present value of a stake of 1: by mere chance, x or more with probability 1/x at most."""
        return self._stake.worth

    def begin(self, share: float) -> None:
        """From now on, the canary gets this share of the requests, above 0 and below 1."""
        self._judge()
        self._window_min = EXPECTED_MIN / min(share, 1 - share)

    def add(self, canary: RequestWindow, stable: RequestWindow) -> None:
        """Take in what both versions did in the same time."""
        self._canary = (self._canary[0] + canary.requests, self._canary[1] + canary.errors)
        self._stable = (self._stable[0] + stable.requests, self._stable[1] + stable.errors)
        if self._canary[0] + self._stable[0] >= self._window_min:
            self._judge()

    def _judge(self) -> None:
        (ours, failed), (theirs, also) = self._canary, self._stable
        self._canary = self._stable = (0, 0)
        errors = failed + also
        if not errors or not ours or not theirs:
            return
        counts = np.arange(max(0, errors - theirs), min(errors, ours) + 1, dtype=np.float64)
        before = counts[:-1]
        steps = np.log((errors - before) * (ours - before)) - np.log((before + 1) * (theirs - errors + before + 1))
        chances = np.concatenate(([0.0], np.cumsum(steps)))
        whole = _log_sum(chances)
        self._stake.multiply([failed * log(odds) - _log_sum(chances + counts * log(odds)) + whole for odds in ODDS])


class RateTest:
    """Whether more than a share of something is different.

    Args:
        rate_max: The share that is permitted, below 1.
    """

    def __init__(self, rate_max: float) -> None:
        self._rate_max = rate_max
        self._stake = _Stake()
        self._is_over = False

    @property
    def evidence(self) -> float:
        """The present value of a stake of 1, as in `ErrorTest`."""
        return inf if self._is_over else self._stake.worth

    def add(self, count: int, different: int) -> None:
        """Take in how many were compared, and how many of them were different."""
        rate = self._rate_max
        if not rate:
            self._is_over = self._is_over or different > 0
            return
        bets = [odds * rate / (1 - rate + odds * rate) for odds in ODDS]
        same = count - different
        self._stake.multiply([different * log(bet / rate) + same * (log1p(-bet) - log1p(-rate)) for bet in bets])


class LatencyTest:
    """Whether the p99 latency of the canary exceeds this multiple of the stable version's.

    Args:
        ratio_max: How many times longer it may be.
        chance: Probability with which a canary may fail that is as good.

    Attributes:
        is_judged: Whether the present samples were large enough for a look.
        ratio_min: By how much it is longer at least, by the latest look; 0 before.
    """

    def __init__(self, ratio_max: float, chance: float) -> None:
        self._ratio_max = ratio_max
        self._chance = chance
        self._looks = 0
        self.begin()

    def begin(self) -> None:
        """Begin with new samples: the load on both versions has changed."""
        self.canary, self.stable = LatencyHistogram(), LatencyHistogram()
        self.is_judged = False
        self.ratio_min = 0.0
        self._next = LATENCIES_MIN

    def add(self, canary: RequestWindow, stable: RequestWindow) -> bool:
        """Take in what both versions did in the same time; return whether the canary fails."""
        self.canary.record(canary.latencies_ns)
        self.stable.record(stable.latencies_ns)
        return self.canary.count >= self._next and self.look()

    def look(self) -> bool:
        """Return whether the canary fails with the present samples."""
        chance = self._chance / ((self._looks + 1) * (self._looks + 2)) / 2  # half for each bound
        upper = rank_above(self.stable.count, chance)
        if upper is None or self.canary.count < LATENCIES_MIN:
            return False
        self._looks += 1
        self._next = 2 * self.canary.count
        lower = rank_below(self.canary.count, chance)
        self.is_judged = True
        at_least = _at_rank(self.canary, lower) if lower is not None else 0
        self.ratio_min = at_least / max(1, _at_rank(self.stable, upper))
        return self.ratio_min > self._ratio_max


def rank_below(count: int, chance: float) -> int | None:
    """Return the highest rank, from 0, whose value lies above the p99 with at most this probability; None for none."""
    at_least = np.cumsum(_tail_chances(count)[::-1])[::-1]
    enough = int(np.argmax(at_least <= chance))  # values above the p99, this number or more
    return count - enough if 0 < enough <= count else None


def rank_above(count: int, chance: float) -> int | None:
    """Return the lowest rank, from 0, whose value lies below the p99 with at most this probability; None for none."""
    at_most = np.cumsum(_tail_chances(count))
    few = int(np.searchsorted(at_most, chance, side="right")) - 1
    return count - few - 1 if few >= 0 else None


def _tail_chances(count: int) -> NDArray[np.float64]:
    """Return how probable each number of values above the p99 is, up to numbers that hardly ever occur."""
    most = min(count, int(count * _TAIL + 12 * (count * _TAIL) ** 0.5 + 40))
    numbers = np.arange(most, dtype=np.float64)
    steps = np.log((count - numbers) / (numbers + 1)) + (log(_TAIL) - log1p(-_TAIL))
    chances = np.exp(count * log1p(-_TAIL) + np.concatenate(([0.0], np.cumsum(steps))))
    return np.append(chances, 0.0)


def _at_rank(histogram: LatencyHistogram, rank: int) -> int:
    return histogram.percentile(min(100.0, 100 * rank / max(1, histogram.count - 1)))


def _mean(logarithms: Sequence[float]) -> float:
    """Return the mean of numbers, given their logarithms; one that is too large for a float is infinite."""
    top = max(logarithms)
    mean = top + log(sum(exp(each - top) for each in logarithms) / len(logarithms))
    return exp(mean) if mean < 700 else inf


def _log_sum(logarithms: NDArray[np.float64]) -> float:
    top = float(logarithms.max())
    return top + log(float(np.exp(logarithms - top).sum()))
