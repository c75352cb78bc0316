import asyncio

from fuzz.fuzz_grpc import run

CASES = 300


def test_mutated_messages_and_sessions_end_cleanly() -> None:
    asyncio.run(run(seed=2026, cases=CASES))
