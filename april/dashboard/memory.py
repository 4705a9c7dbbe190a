"""Settings that keep the dashboard's memory small while many threads allocate and free large arrays."""

import os
import sys
from importlib.abc import MetaPathFinder

from april.processes import heap

LARGE_BLOCK_BYTES = 256 << 10
"""Blocks from this size on are mapped separately, and returned to the system when freed."""


def configure_heap() -> None:
    """Use one heap for all threads; call before threads start and before pyarrow is imported.

    By default each thread has its own heap, which keeps freed memory. With one heap, large blocks go back to the
    system, and Arrow allocates from it, too."""
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    sys.meta_path.insert(0, BlockPandas())
    heap.tune(LARGE_BLOCK_BYTES, LARGE_BLOCK_BYTES, arenas=1)


class BlockPandas(MetaPathFinder):
    """Import hook that hides pandas, which pyarrow would import for type checks, at a cost of 35 MB."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)
