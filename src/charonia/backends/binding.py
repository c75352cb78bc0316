"""Keeps what an instance starts on the cores that its host policy names."""

import contextlib
import os
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def bound_to(cores: Sequence[int]) -> Iterator[None]:
    """Run the calling thread on these cores for a while; threads and processes that it starts meanwhile stay there.

    Args:
        cores: Numbers of the cores; empty for any, which changes nothing.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
