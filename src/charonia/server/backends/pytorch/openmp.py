"""Teams of threads that compute one operator together, as OpenMP makes them.

PyTorch's operators are computed by a team that belongs to the thread that calls them, and that stays until this thread
ends. Where the teams of a process, idle ones included, have more threads than there are cores, GNU's OpenMP lets them
wait for each other asleep, nearly at once. That costs a network of many short operators a third of its speed (ResNet-50
in BF16 on two cores: 16 images a second in place of 25). So a model is loaded by a thread that ends, and waiting is
awake for 10 us in place of 1 us. Source: libgomp's manual, "GOMP_SPINCOUNT", and `gomp_throttled_spin_count_var`.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_WAITING = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "300000"}
"""Waits of 10 us where there are many teams, and of 3 ms, as without these, where there are not."""


async def in_passing_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a thread that ends afterwards, and its team with it."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="pytorch_load")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)
    finally:
        thread.shutdown(wait=False)


@contextmanager
def awake_while_waiting() -> Iterator[None]:
    """Have the OpenMP library that is loaded meanwhile wait awake; unless the environment says how it is to wait."""
    if any(name in os.environ for name in _WAITING):
        yield
        return
    os.environ.update(_WAITING)
    try:
        yield
    finally:  # it has been read, and is not for workers
        for name in _WAITING:
            os.environ.pop(name, None)
