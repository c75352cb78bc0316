"""How the worker of an instance does: what is wrong with it, how often it was started, when to start it again. Pure."""

RESTART_DELAY_S = 0.05
"""Pause before the first restart; it doubles with every one in a row that does not lead to an answer."""

RESTART_DELAY_S_MAX = 30.0

PROBLEM_CHARS_MAX = 4096
"""Of a longer reason, the beginning and the end are kept."""


class WorkerHealth:
    """What happened to the worker processes of one instance.

    Attributes:
        restarts: How often the worker was started again.
        problem: Why none runs now, "" while one does.
    """

    __slots__ = ("_failures", "problem", "restarts")

    def __init__(self) -> None:
        self.restarts = 0
        self.problem = ""
        self._failures = 0

    def ended(self, reason: str) -> float:
        """The worker ended; return the pause in s before the next start."""
        delay = min(RESTART_DELAY_S * 2.0**self._failures, RESTART_DELAY_S_MAX)
        self._failures = min(self._failures + 1, 32)
        often = f" {self._failures} times in a row without an answer" if self._failures > 1 else ""
        if len(reason) > PROBLEM_CHARS_MAX:
            reason = f"{reason[: PROBLEM_CHARS_MAX // 2]} [...] {reason[-PROBLEM_CHARS_MAX // 2 :]}"
        self.problem = f"its worker has ended{often} and is started again after {delay:g} s: {reason}"
        return delay

    def restarted(self) -> None:
        """A new worker was started; it is not ready yet."""
        self.restarts += 1

    def ready(self) -> bool:
        """The worker has initialized; return whether that ends a problem."""
        had_problem = bool(self.problem)
        self.problem = ""
        return had_problem

    def answered(self) -> None:
        """The worker has done a batch."""
        self._failures = 0
