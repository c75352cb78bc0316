"""Keeps OpenMP's thread teams, which compute PyTorch's operators, from sleeping too early.

Each thread that calls an operator has a team of its own, which lives as long as that thread. Once the teams of a
process, idle ones included, have more threads than there are cores, GNU's OpenMP spins only 1 us before a waiting
thread sleeps. That costs a network of many short operators a third of its speed (ResNet-50 in BF16 on two cores: 16
images a second in place of 25). So a temporary thread loads each model, and teams spin for 10 us. Source: libgomp's
manual, "GOMP_SPINCOUNT", and `gomp_throttled_spin_count_var`.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_WAITING = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "300000"}
"""Spin for 10 us where there are too many teams, else for 3 ms, which is the default."""


async def in_passing_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a temporary thread, whose team ends with it."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="pytorch_load")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)
    finally:
        thread.shutdown(wait=False)


@contextmanager
def spinning_while_waiting() -> Iterator[None]:
    """Have the OpenMP library that is loaded meanwhile spin while it waits, unless the environment configures this."""
    if any(name in os.environ for name in _WAITING):
        yield
        return
    os.environ.update(_WAITING)
    try:
        yield
    finally:  # the library has read it, and workers should not inherit it
        for name in _WAITING:
            os.environ.pop(name, None)
