"""What a restart cannot mend is not tried again: torchrun restarts ranks whatever the status with which they end, so
those that it starts look in its store whether an earlier one has refused."""

import contextlib
import os

RESTARTS, REFUSED_KEY = "TORCHELASTIC_RESTART_COUNT", "april/refused"
TIMEOUT_S = 10


def remember() -> None:
    """For the ranks that torchrun will start in this one's place."""
    if RESTARTS in os.environ:
        with contextlib.suppress(RuntimeError):
            launcher_store().set(REFUSED_KEY, "")


def is_remembered() -> bool:
    return int(os.environ.get(RESTARTS, 0)) > 0 and launcher_store().check([REFUSED_KEY])


def launcher_store():
    from april.connections import store

    return store.connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), TIMEOUT_S)
