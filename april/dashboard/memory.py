"""How the dashboard keeps its memory small: large arrays come and go in many threads, beside an index that stays."""

import contextlib
import ctypes
import os
import sys
from importlib.abc import MetaPathFinder

LARGE_BLOCK_BYTES = 256 << 10
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""from glibc's malloc.h"""


def settle() -> None:
    """Call before threads begin and before pyarrow is imported.

    Each thread would have a heap of its own, which keeps what was freed. Here there is one, large blocks are the
    system's own and go back to it, and Arrow takes its memory from there, too.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    sys.meta_path.insert(0, WithoutPandas())
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, LARGE_BLOCK_BYTES)


def give_back() -> None:
    """What was freed between blocks that stay goes back to the system, page by page."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class WithoutPandas(MetaPathFinder):
    """pyarrow imports pandas where it can, to ask whether what it is given is pandas'. Nothing here is, and it would
    take 35 MB."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)
