"""Settings of the memory allocator, if it is glibc's."""

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt`, from glibc's malloc.h."""


def tune(large_block_bytes: int, kept_free_bytes: int, arenas: int = 0) -> None:
    """Blocks above `large_block_bytes` are mapped on their own and returned to the system when freed; at most
    `kept_free_bytes` free bytes stay at the end of a heap. `arenas`: most heaps; 0 leaves glibc's limit."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, large_block_bytes)
        mallopt(M_TRIM_THRESHOLD, kept_free_bytes)
        if arenas:
            mallopt(M_ARENA_MAX, arenas)


def give_back() -> None:
    """Return free pages between live blocks to the system."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
