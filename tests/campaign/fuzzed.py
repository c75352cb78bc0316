"""The fuzzers of `fuzz/`, each with as many cases as the campaign asks for."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping

from fuzz import fuzz_channel, fuzz_grpc, fuzz_http, fuzz_pbtxt
from tests.campaign.figures import Context, Figures

FUZZERS: Mapping[str, Callable[[random.Random], Awaitable[None] | None]] = {
    "HTTP": fuzz_http.check,
    "gRPC": fuzz_grpc.check,
    "config.pbtxt": fuzz_pbtxt.check_mutated,
    "channel": fuzz_channel.check,
}


async def _run(check: Callable[[random.Random], Awaitable[None] | None], seed: int, cases: int) -> str:
    """Run cases of a fuzzer up to the first that breaks its invariant; return the problem, "" for none."""
    log = fuzz_http.FaultLog()
    logging.getLogger("charonia").addHandler(log)
    try:
        for case in range(cases):
            try:
                if (checking := check(random.Random(f"{seed} {case}"))) is not None:
                    await checking
                assert not log.records, log.records
            except Exception as error:
                return f"seed {seed}, case {case}: {type(error).__name__}: {error}"
    finally:
        logging.getLogger("charonia").removeHandler(log)
    return ""


def run(context: Context, name: str) -> Figures:
    """Run a fuzzer."""
    figures = Figures().counted(cases=context.cases)
    if broken := asyncio.run(_run(FUZZERS[name], context.seed, context.cases)):
        figures.found(broken)
    return figures
