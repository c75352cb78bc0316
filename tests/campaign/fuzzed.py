"""The fuzzers of `fuzz/`, each with as many cases as the campaign asks for."""

import asyncio
from collections.abc import Callable, Mapping

from fuzz import fuzz_channel, fuzz_grpc, fuzz_http, fuzz_pbtxt
from tests.campaign.figures import Context, Figures

FUZZERS: Mapping[str, Callable[[int, int], object]] = {
    "HTTP": lambda seed, cases: asyncio.run(fuzz_http.run(seed, cases)),
    "gRPC": lambda seed, cases: asyncio.run(fuzz_grpc.run(seed, cases)),
    "config.pbtxt": lambda seed, cases: fuzz_pbtxt.run(seed, cases=cases),
    "channel": fuzz_channel.run,
}


def run(context: Context, name: str) -> Figures:
    """Run a fuzzer. It stops at the first case that breaks its invariant."""
    figures = Figures().counted(cases=context.cases)
    try:
        FUZZERS[name](context.seed, context.cases)
    except Exception as error:
        figures.found(" ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
    return figures
