"""What the parts of the campaign are given, and what they report."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

FINDINGS_MAX = 20
"""Findings of one part that are kept with their text; `Figures.finding_count` counts them all."""


@dataclass(frozen=True, slots=True)
class Context:
    """How much a part does.

    Attributes:
        folder: An empty folder for its files.
        seed: Seed of all that is random.
        requests: Requests of the checker in each of its modes, and of a browser to each listener.
        cases: Cases of each fuzzer.
        archive_mib: Size of the largest contents and headers of hostile archives.
        seconds: Time in which modes with crashes and upgrades send more requests than that; 0 for none.
        volume: Requests of the volume run.
        until_s: Monotonic time at which the checker and the volume run send no more.
    """

    folder: Path
    seed: int
    requests: int
    cases: int
    archive_mib: int
    seconds: float
    volume: int
    until_s: float


@dataclass(slots=True)
class Figures:
    """What a part has found.

    Attributes:
        counts: How often what happened.
        findings: What is wrong, one sentence each; no more than `FINDINGS_MAX`.
        finding_count: How many there were.
    """

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    finding_count: int = 0

    def found(self, text: str) -> None:
        """Add a finding."""
        self.finding_count += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(text)

    def counted(self, **counts: int) -> Self:
        """Add to the counts, and return these figures."""
        self.counts.update({name.replace("_", " "): count for name, count in counts.items()})
        return self


Part = Callable[[Context], Figures]


def table(figures: Mapping[str, Figures], seconds: Mapping[str, float]) -> str:
    """Return the figures of all parts as a table, with the findings below it."""
    lines = [f"{'part':<26} {'time':>8}  {'findings':>8}  counts"]
    for name, each in figures.items():
        counts = ", ".join(f"{count:,} {what}" for what, count in each.counts.items())
        lines.append(f"{name:<26} {seconds[name]:>6.0f} s  {each.finding_count:>8}  {counts}")
    for name, each in figures.items():
        lines += [f"  {name}: {text}" for text in each.findings]
    return "\n".join(lines)
