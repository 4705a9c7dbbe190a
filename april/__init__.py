"""April: active partial rollouts for RL of language models.

A durable message broker between generation workers and a distributed learner.
"""

import sys
from typing import TYPE_CHECKING, Any

from april.version import VERSION as __version__

if TYPE_CHECKING:
    from april.trainers.rollouts import connect as connect

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # under `python -m april...`, modules of the working directory shadow no others

__all__ = ["__version__", "connect"]


def __getattr__(name: str) -> Any:
    """Import `april.connect`, which needs torch, only when it is asked for."""
    if name != "connect":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from april.trainers.rollouts import connect

    return connect
