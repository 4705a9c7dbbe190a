"""How the dashboard keeps its memory small: large arrays come and go in many threads, beside an index that stays."""

import os
import sys
from importlib.abc import MetaPathFinder

from april.processes import heap

LARGE_BLOCK_BYTES = 256 << 10


def settle() -> None:
    """Call before threads begin and before pyarrow is imported.

    Each thread would have a heap of its own, which keeps what was freed. Here there is one, large blocks are the
    system's own and go back to it, and Arrow takes its memory from there, too.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    sys.meta_path.insert(0, WithoutPandas())
    heap.tune(LARGE_BLOCK_BYTES, LARGE_BLOCK_BYTES, arenas=1)


class WithoutPandas(MetaPathFinder):
    """pyarrow imports pandas where it can, to ask whether what it is given is pandas'. Nothing here is, and it would
    take 35 MB."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)
