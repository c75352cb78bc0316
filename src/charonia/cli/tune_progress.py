"""What `charonia tune` says while it runs, a line a trial."""

from typing import TextIO

from charonia.tools.tune.api import Failed, Metric
from charonia.tools.tune.decision import Ranked
from charonia.tools.tune.progress import Event, Noted, SearchDone, TrialBegun, TrialDone


class Printer:
    """Prints what happens.

    Args:
        out: Where to.
        quiet: Whether nothing is said.
    """

    def __init__(self, out: TextIO, *, quiet: bool) -> None:
        self._out = out
        self._quiet = quiet
        self._names: dict[str, str] = {}
        self._left = ""

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if self._quiet:
            return
        match event:
            case TrialBegun():
                self._names[event.trial.variant.key] = event.name
                self._left = "" if event.left_s is None else f", {event.left_s:.0f} s left"
            case TrialDone():
                name = self._names.get(event.trial.variant.key, str(event.trial.variant))
                self._say(f"[{event.trial.number}] {name}, {_loads(event)}: {self._found(event)}{self._left}")
            case Noted():
                self._say(event.text)
            case SearchDone():
                pass

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _found(self, event: TrialDone) -> str:
        outcome = event.outcome
        if isinstance(outcome, Failed):
            return f"failed: {outcome.reason.splitlines()[0]}"
        parts = [
            f"{metrics[Metric.THROUGHPUT].value:,.0f} infer/s, p99 {metrics[Metric.LATENCY_P99].value:.2f} ms"
            for metrics in outcome.metrics.values()
        ]
        text = "; ".join(parts) + (" (from the journal)" if event.resumed else "")
        return text + (f"; best so far {self._best(event.best)}" if event.best is not None else "")

    def _best(self, best: Ranked) -> str:
        rate = sum(metrics[Metric.THROUGHPUT].value for metrics in best.metrics.values())
        return f"{self._names.get(best.variant.key, str(best.variant))} ({rate:,.0f} infer/s)"


def _loads(event: TrialDone) -> str:
    return "; ".join(dict.fromkeys(str(load) for load in event.trial.loads))
