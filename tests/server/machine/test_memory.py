"""What becomes of memory that is freed, in processes of their own: its settings are for a whole process."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is set")

PAGES_OF_A_BATCH = 40 * 256

BATCHES = """
import ctypes, resource, sys, threading
from charonia.server.machine.memory import keep_freed_memory, release_freed_memory
if len(sys.argv) > 1:
    keep_freed_memory(dict(word.split("=", 1) for word in sys.argv[2:]))
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
resident = lambda: int(open("/proc/self/statm").read().split()[1])

def batches():
    for number in range(11):
        if number == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [libc.malloc(10 << 20) for _ in range(4)]
        for tensor in tensors:
            libc.memset(tensor, 1, 10 << 20)
        for tensor in tensors:
            libc.free(tensor)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    kept = resident()
    release_freed_memory()
    print(faults, kept - resident())

thread = threading.Thread(target=batches)
thread.start()
thread.join()
"""


def faults_and_released_pages(*arguments: str) -> tuple[int, int]:
    """Return the page faults of ten batches after the first, and the pages that were free at the end."""
    done = subprocess.run([sys.executable, "-c", BATCHES, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    faults, released = map(int, done.stdout.split())
    return faults, released


def test_the_memory_of_a_batch_stays_for_the_next_and_goes_when_it_is_released() -> None:
    faults, released = faults_and_released_pages("keep")
    default, _ = faults_and_released_pages()
    assert faults < default / 10
    assert released > PAGES_OF_A_BATCH / 2


@pytest.mark.parametrize(
    "environment",
    [
        ["GLIBC_TUNABLES=glibc.malloc.check=0"],
        ["MALLOC_TRIM_THRESHOLD_=0", "MALLOC_MMAP_THRESHOLD_=0", "MALLOC_ARENA_MAX=0"],
    ],
)
def test_what_the_environment_sets_stays(environment: list[str]) -> None:
    faults, _ = faults_and_released_pages("keep", *environment)
    kept, _ = faults_and_released_pages("keep")
    assert faults > 10 * kept
