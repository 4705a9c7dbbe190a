"""How the broker keeps its memory: hundreds of thousands of small objects live long, a few large ones briefly."""

import contextlib
import ctypes
import gc

GC_THRESHOLDS = (50_000, 20, 100)
"""looking for garbage among the ledger's objects is worth it less often than usual"""
LARGE_BLOCK_BYTES = 1 << 20
M_MMAP_THRESHOLD = -3
"""from glibc's malloc.h"""


def settle() -> None:
    """Call once all that the process begins with is loaded.

    glibc takes a large block from the system and returns it whole, but raises what is large to the size of each one
    that is freed; a snapshot's image would soon fall between objects that live on. Here it stays at
    `LARGE_BLOCK_BYTES`.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
