"""Runs scenarios by seed and prints what differs: python -m tests.interop.campaign FIRST [COUNT]."""

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.interop.campaign.calls import request_count, scenario
from tests.interop.campaign.drive import DiedError, run


def main(first: int, count: int = 1) -> None:
    """Run `count` scenarios, from the seed `first` on; print each difference, and how many of each kind there were."""
    seeds = range(first, first + count)
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed, found in run(seeds, Path(folder)):
            known = None if isinstance(found, DiedError) else found.rule
            print(f"seed {seed}: {known or found}", flush=True)
            kinds["Triton ended" if isinstance(found, DiedError) else known or "not documented"] += 1
    calls = sum(request_count(call) for seed in seeds for call in scenario(seed).calls)
    print(f"{count} sequences of {calls} requests, {kinds.total()} differences of {len(kinds)} kinds:")
    for kind, number in kinds.most_common():
        print(f"{number:6} {kind}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
