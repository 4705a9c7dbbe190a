"""Memory of a refusal across restarts: torchrun restarts ranks whatever their exit status, so a rank that refuses to
work says so in torchrun's store, and restarted ranks look there first."""

import contextlib
import os

RESTARTS, REFUSED_KEY = "TORCHELASTIC_RESTART_COUNT", "april/refused"
TIMEOUT_S = 10


def remember() -> None:
    """Record in the launcher's store that this rank refused, for the ranks that torchrun starts next."""
    if RESTARTS in os.environ:
        with contextlib.suppress(RuntimeError):
            launcher_store().set(REFUSED_KEY, "")


def is_remembered() -> bool:
    return int(os.environ.get(RESTARTS, 0)) > 0 and launcher_store().check([REFUSED_KEY])


def launcher_store():
    from april.connections import store

    return store.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), TIMEOUT_S)
