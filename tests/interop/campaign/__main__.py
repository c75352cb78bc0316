"""Runs scenarios by seed and prints what differs: python -m tests.interop.campaign FIRST [COUNT]."""

import sys
import tempfile
from pathlib import Path

from tests.interop.campaign.drive import DiedError, run

first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
with tempfile.TemporaryDirectory() as folder:
    for seed, found in run(range(first, first + count), Path(folder)):
        if isinstance(found, DiedError) or found.rule is None:
            print(f"seed {seed}: {found}", flush=True)
