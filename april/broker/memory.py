"""How the broker keeps its memory: hundreds of thousands of small objects live long, a few large ones briefly."""

import contextlib
import ctypes
import gc

GC_THRESHOLDS = (50_000, 20, 100)
"""looking for garbage among the ledger's objects is worth it less often than usual"""
LARGE_BLOCK_BYTES = 1 << 20
KEPT_FREE_BYTES = 64 << 20
TRIM_S = 5.0
"""how often to `trim`"""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""from glibc's malloc.h"""


def settle() -> None:
    """Call once all that the process begins with is loaded.

    glibc takes a large block from the system and returns it whole, but raises what is large to the size of each one
    that is freed; large messages would soon fall between objects that live on. Here it stays at
    `LARGE_BLOCK_BYTES`. What is free at the end of the heap is kept, up to `KEPT_FREE_BYTES`: otherwise the pages of
    messages go back as they are handled, and have to be faulted in again.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE_BYTES)


def trim() -> None:
    """Give the system the pages that are free between objects that live, which glibc keeps: after each batch there are
    tens of megabytes of them. It takes a millisecond or two."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
