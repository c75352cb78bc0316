"""How much memory the processes of a server use, with all of their descendants."""

from collections.abc import Iterable

import psutil


def memory_of(pids: Iterable[int], limit: int) -> dict[int, int]:
    """Return the memory of processes and their descendants in bytes, by the number of the process.

    Pages that several processes map are shared out among them (PSS). That takes the system long to find out for large
    processes, so it is only asked where the resident memory, which counts such pages once for each, is above the limit.
    """
    trees = {pid: _tree(pid) for pid in pids}
    sizes = {pid: sum(map(_resident, tree)) for pid, tree in trees.items()}
    if sum(sizes.values()) > limit:
        sizes = {pid: sum(map(_proportional, tree)) for pid, tree in trees.items()}
    return sizes


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:  # it has ended
        return []


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _proportional(process: psutil.Process) -> int:
    """Return the proportional set size, or the resident one where the system does not tell."""
    try:
        return int(process.memory_full_info().pss)
    except (psutil.Error, AttributeError):
        return _resident(process)
