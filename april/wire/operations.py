"""Messages between monitors and the broker: status queries, and an operator's commands."""

from typing import Literal

from april.wire.message import Message

StopState = Literal["stopped", "failed"]


class StatusRequest(Message):
    pass


class Status(Message):
    """One uint8 array: the status as JSON."""


class StopRun(Message):
    """Ends the run. `state` is recorded in summary.json."""

    reason: str
    state: StopState = "stopped"


class Drain(Message):
    """Stops granting leases and recalls samples in generation, until a `Drain` with `on` false. Survives restarts."""

    on: bool = True


class DeadLettersRequest(Message):
    pass


class DeadLetters(Message):
    """One uint8 array: the dead letters as JSON."""


class Requeue(Message):
    """Draws the prompts of these dead groups again; an empty list means every dead group that can be redrawn."""

    groups: list[int] = []


class Requeued(Message):
    """`groups`: ids of the groups that this request has re-queued."""

    groups: list[int]
