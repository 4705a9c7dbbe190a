"""Resources of a process: its address space, the heap that glibc's allocator keeps, and its file descriptors."""

import contextlib
import ctypes
import errno
import resource


def limit_memory(memory_mb: int) -> None:
    """Limit the address space of this process, which runs user code, to `memory_mb` MiB, and disable core files."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# --- heap -------------------------------------------------------------------------------------------------------------


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt`, from glibc's malloc.h."""


def tune_allocator(large_block_bytes: int, kept_free_bytes: int, arenas: int = 0) -> None:
    """Set when glibc returns memory to the system; does nothing with another allocator.

    Blocks above `large_block_bytes` are mapped on their own and returned when freed; at most `kept_free_bytes` free
    bytes stay at the end of a heap. `arenas`: most heaps; 0 leaves glibc's limit.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, large_block_bytes)
        mallopt(M_TRIM_THRESHOLD, kept_free_bytes)
        if arenas:
            mallopt(M_ARENA_MAX, arenas)


def return_free_pages() -> None:
    """Return free pages between the heap's live blocks to the system; does nothing with another allocator than
    glibc's."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# --- file descriptors -------------------------------------------------------------------------------------------------


NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errno values for a lack of descriptors, which ends once another descriptor is closed."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open descriptors to the hard limit; returns the limit in force.

    Every connection takes a descriptor, even before its handshake.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        return soft
    return hard
