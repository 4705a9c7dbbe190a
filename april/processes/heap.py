"""How the system's allocator keeps memory, where it is glibc's."""

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""from glibc's malloc.h"""


def tune(large_block_bytes: int, kept_free_bytes: int, arenas: int = 0) -> None:
    """Larger blocks are the system's own and go back to it whole; of what is free at the end of a heap so many bytes
    stay. `arenas`: most heaps, 0 for as many as threads take."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, large_block_bytes)
        mallopt(M_TRIM_THRESHOLD, kept_free_bytes)
        if arenas:
            mallopt(M_ARENA_MAX, arenas)


def give_back() -> None:
    """The system gets the pages that are free between blocks that stay."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
