"""Memory of this process."""

import ctypes


def release_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc).

    Loading a model frees about twice its weights, which would otherwise stay with this process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
