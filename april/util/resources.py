"""Memory limit of processes that run user code."""

import contextlib
import ctypes
import errno
import resource


def limit_memory(memory_mb: int) -> None:
    """Limit this process's address space, and disable core files."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# --- settings of the memory allocator, if it is glibc's ---


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


# --- the limit of open file descriptors, and the errors of a process that has reached it ---


NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errno values for a lack of descriptors, which ends once another descriptor is closed."""


def raise_limit() -> int:
    """Raise this process's limit to the hard limit; returns the limit in force.

    Every connection takes a descriptor, even before its handshake.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        return soft
    return hard
