"""Runs scenarios by seed and prints what differs: python -m tests.interop.campaign FIRST [COUNT]."""

import sys
import tempfile
from pathlib import Path

from tests.interop.campaign.drive import DiedError, run


def main(first: int, count: int = 1) -> None:
    """Run `count` scenarios, from the seed `first` on."""
    with tempfile.TemporaryDirectory() as folder:
        for seed, found in run(range(first, first + count), Path(folder)):
            known = None if isinstance(found, DiedError) else found.rule
            print(f"seed {seed}: {known or found}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
