"""Random models and calls on Charonia and Triton: what differs is a fault of ours, or a row of docs/compatibility.md.

`--campaign-scenarios N` runs N scenarios that were not run before. `python -m tests.interop.campaign SEED` runs one
again and prints what differs.
"""

import time
from pathlib import Path

import pytest
from tests.interop.campaign.calls import scenario
from tests.interop.campaign.compare import RULES
from tests.interop.campaign.drive import DiedError, run
from tests.support.peers import TRITON

COMPATIBILITY = Path(__file__).parents[2] / "docs" / "compatibility.md"
FOUND_SOMETHING = (1, 2, 3, 4, 1014, 1021, 4025, 5008, 5009, 6000, 6003, 6112, 6135, 9226)
"""Seeds of scenarios that once found a fault, or a difference that was not documented."""


def test_a_seed_always_makes_the_same_scenario() -> None:
    assert str(scenario(5)) == str(scenario(5)) != str(scenario(6))


@pytest.mark.parametrize("row", RULES)
def test_what_may_differ_is_documented(row: str) -> None:
    assert f"\n| {row}" in COMPATIBILITY.read_text()


@pytest.mark.timeout(24 * 3600)
def test_a_program_cannot_tell_charonia_from_triton(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not TRITON.exists():
        pytest.skip("Triton is not installed: bench/peers.sh installs it")
    count = request.config.getoption("campaign_scenarios")
    first = int(time.time())
    seeds = [*FOUND_SOMETHING, *range(first, first + count)]

    found = [
        f"seed {seed}: {difference}"
        for seed, difference in run(seeds, tmp_path)
        if not isinstance(difference, DiedError) and difference.rule is None
    ]

    assert not found, "\n\n".join(found)
