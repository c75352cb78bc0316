import asyncio

from fuzz.fuzz_http import run

CASES = 200


def test_mutated_bodies_and_sessions_end_cleanly() -> None:
    asyncio.run(run(seed=2026, cases=CASES))
