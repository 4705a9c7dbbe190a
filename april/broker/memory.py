"""Memory settings of the broker, whose heap has many small long-lived objects and a few large short-lived ones."""

import gc

from april.processes import clock, heap

GC_THRESHOLDS = (50_000, 20, 100)
"""Collection thresholds, above the defaults: scanning the ledger's many live objects is rarely worth it."""
LARGE_BLOCK_BYTES = 1 << 20
KEPT_FREE_BYTES = 64 << 20
TRIM_S, TRIM_SHARE = 5.0, 0.001
"""Least interval of giving back free memory, and the largest share of time it may take."""


def apply_settings() -> None:
    """Apply the settings; call it once everything is loaded.

    glibc maps large blocks separately and returns them to the system when freed, but raises its threshold for "large"
    with each one freed, so that large messages would soon fragment the heap. Here the threshold stays at
    `LARGE_BLOCK_BYTES`. Up to `KEPT_FREE_BYTES` at the end of the heap are kept; otherwise the pages of messages would
    be released and faulted in again for each message.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    heap.tune(LARGE_BLOCK_BYTES, KEPT_FREE_BYTES)


class Trimmer:
    """Gives free memory between live objects back to the system, tens of megabytes after each batch.

    It takes a millisecond or two; with a larger heap, where it takes longer, it is done less often.
    """

    def __init__(self) -> None:
        self._at = 0.0

    def trim_if_due(self) -> None:
        """Give memory back if it is time; call it in each pass of the broker's loop."""
        if (began := clock.now()) >= self._at:
            heap.give_back()
            now = clock.now()
            self._at = now + max(TRIM_S, (now - began) / TRIM_SHARE)
