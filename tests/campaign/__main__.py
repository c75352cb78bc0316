"""The campaign: checked requests, crashes, upgrades, hostile input of every kind, and the roles of all API calls.

    python -m tests.campaign [--parts NAME...] [--minutes M] [--seed N] [--requests N] [--cases N] [--archive-mib N]
                             [--seconds S] [--volume N]

The volume run is the last part and ends with the time; a part that cannot begin in time is a finding. The last lines
are a table with the figures of each part and everything that was found. The exit status is 1 if something was found,
and 2 if a part itself has failed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.campaign import archive_bombs, browser_requests, checker, fuzzed, role_matrix
from tests.campaign.figures import Context, Figures, Part, table

HOSTILE_TESTS = Path(__file__).parents[1] / "platform" / "isolation" / "test_hostile_models.py"


def _hostile_models(context: Context) -> Figures:
    """Check, serve and ask models of each backend that go for what is not theirs. Each needs a platform: a test."""
    report = context.folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", str(HOSTILE_TESTS)]
    left_s = max(1.0, context.until_s - time.monotonic())
    subprocess.run(command, cwd=HOSTILE_TESTS.parents[3], stdout=subprocess.DEVNULL, check=False, timeout=left_s)
    figures = Figures()
    for case in ET.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            figures.found(str(case.get("name")))
        elif case.find("skipped") is not None:
            figures.counts["models whose library is not installed"] += 1
        else:
            figures.counts["models refused as data, and harmless where they are served"] += 1
    return figures


def _not_begun() -> Figures:
    figures = Figures()
    figures.found("the time was over before this part began")
    return figures


PARTS: Mapping[str, Part] = {
    **{f"checker, {mode}": partial(checker.run, mode=mode) for mode in checker.MODES},
    "roles": role_matrix.run,
    "browsers": browser_requests.run,
    "archives": archive_bombs.run,
    "hostile models": _hostile_models,
    **{f"fuzzed {name}": partial(fuzzed.run, name=name) for name in fuzzed.FUZZERS},
    "volume": checker.run_volume,
}


def main(arguments: list[str]) -> int:
    """Run the parts, print their figures, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all", metavar="NAME")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="limit of the whole campaign (60)")
    parser.add_argument("--requests", type=int, default=5_000, help="of each mode of the checker, and to each listener")
    parser.add_argument("--cases", type=int, default=1_000, help="of each fuzzer")
    parser.add_argument("--archive-mib", type=int, default=128, help="size of hostile archives, up to 2048")
    parser.add_argument("--seconds", type=float, default=60, help="least time of the modes with crashes and upgrades")
    parser.add_argument("--volume", type=int, default=960_000, help="requests of the volume run")
    options = parser.parse_args(arguments)
    until_s = time.monotonic() + 60 * options.minutes
    figures: dict[str, Figures] = {}
    seconds: dict[str, float] = {}
    is_broken = False
    for name in options.parts:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            given = {each.name: getattr(options, each.name, None) for each in fields(Context)}
            context = Context(**{**given, "folder": Path(folder), "until_s": until_s})
            try:
                figures[name] = PARTS[name](context) if began < until_s else _not_begun()
            except Exception as error:
                traceback.print_exc()
                is_broken = True
                figures[name] = Figures()
                figures[name].found(f"the part has failed: {type(error).__name__}: {error}")
        seconds[name] = time.monotonic() - began
        print(f"{name}: {figures[name].finding_count} findings", *figures[name].findings, sep="\n  ", flush=True)
    print(f"\n{table(figures, seconds)}\nall parts: {sum(seconds.values()):.0f} s")
    return 2 if is_broken else int(any(each.finding_count for each in figures.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
