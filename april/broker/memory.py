"""How the broker keeps its memory: hundreds of thousands of small objects live long, a few large ones briefly."""

import gc

from april.processes import clock, heap

GC_THRESHOLDS = (50_000, 20, 100)
"""looking for garbage among the ledger's objects is worth it less often than usual"""
LARGE_BLOCK_BYTES = 1 << 20
KEPT_FREE_BYTES = 64 << 20
TRIM_S, TRIM_SHARE = 5.0, 0.001
"""how often free memory is given back, and most of the time that it may take"""


def settle() -> None:
    """Call once all that the process begins with is loaded.

    glibc takes a large block from the system and returns it whole, but raises what is large to the size of each one
    that is freed; large messages would soon fall between objects that live on. Here it stays at
    `LARGE_BLOCK_BYTES`. What is free at the end of the heap is kept, up to `KEPT_FREE_BYTES`: otherwise the pages of
    messages go back as they are handled, and have to be faulted in again.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    heap.tune(LARGE_BLOCK_BYTES, KEPT_FREE_BYTES)


class Trimmer:
    """Gives back what is free between objects that live: after each batch there are tens of megabytes of it. That
    takes a millisecond or two; where the heap is so large that it takes longer, it is done as much less often."""

    def __init__(self) -> None:
        self._at = 0.0

    def passed(self) -> None:
        """Call in each pass of the loop."""
        if (began := clock.now()) >= self._at:
            heap.give_back()
            now = clock.now()
            self._at = now + max(TRIM_S, (now - began) / TRIM_SHARE)
