"""Common to the programs of a rank: a refusal is remembered across restarts, and the exit status says whether a restart
helps."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import TypeVarTuple

from april.learner.launch import RESTARTS
from april.util.errors import ConfigError
from april.util.lifetime import REFUSED, die_with_parent, exit_at_once
from april.util.time_sharing import TimeSliceLate
from april.wire.sockets.broker import AccessDenied, BrokerRefused, BrokerUnreachable

log = logging.getLogger(__name__)

REFUSED_KEY = "april/refused"
STORE_TIMEOUT_S = 10
Given = TypeVarTuple("Given")


def run_rank(program: str, read: Callable[[], tuple[*Given]], train: Callable[[*Given], None]) -> int:
    """Read the arguments of a rank's `program` by `read` and train with them; ends the process with the exit status: 0,
    REFUSED for errors that a restart cannot fix, otherwise 1."""
    die_with_parent()
    if refusal_is_remembered():
        return REFUSED
    try:
        given = read()
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        status = REFUSED
    except TimeoutError as error:
        print(f"{program}: {error}", file=sys.stderr)
        status = 1
    else:
        status = status_of_training(program, train, *given)
    if status == REFUSED:
        remember_refusal()
    exit_at_once(status)


def status_of_training(program: str, train: Callable[[*Given], None], *given: *Given) -> int:
    """Call `train(*given)`; returns the exit status: 0, REFUSED for errors that a restart cannot fix, otherwise 1.
    `program`: name of the program, for the error's text."""
    from april.learner.attention import PackedAttentionError
    from april.learner.loading import ModelError
    from april.learner.loop import Diverged

    try:
        train(*given)
    except (
        ConfigError,
        BrokerUnreachable,
        BrokerRefused,
        Diverged,
        ModelError,
        PackedAttentionError,
        TimeSliceLate,
    ) as error:
        print(f"{program}: {error}", file=sys.stderr)
        passes = isinstance(error, (BrokerUnreachable, TimeSliceLate)) and not isinstance(error, AccessDenied)
        return 1 if passes else REFUSED
    except Exception:
        log.exception("the learner cannot go on")
        return 1
    return 0


# --- refusals across restarts -----------------------------------------------------------------------------------------


def remember_refusal() -> None:
    """Record in torchrun's store that this rank refused to train, so that ranks restarted by torchrun exit at once."""
    if is_under_torchrun():
        with contextlib.suppress(RuntimeError):
            torchrun_store().set(REFUSED_KEY, "")


def refusal_is_remembered() -> bool:
    return is_under_torchrun() and int(os.environ[RESTARTS]) > 0 and torchrun_store().check([REFUSED_KEY])


def is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def torchrun_store():
    from april.weights import channel

    return channel.connect_to_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), STORE_TIMEOUT_S)
