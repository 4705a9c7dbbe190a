"""What a monitor asks of the broker, and what an operator orders."""

from typing import Literal

from april.wire.message import Message

StopState = Literal["stopped", "failed"]


class StatusRequest(Message):
    pass


class Status(Message):
    """Arrays: one uint8 frame of JSON."""


class StopRun(Message):
    """End the run; `state` is what summary.json says of it: stopped | failed."""

    reason: str
    state: StopState = "stopped"


class Drain(Message):
    """Hand out nothing more and have back what is generated, until `on` is false; it outlasts restarts."""

    on: bool = True


class DeadLettersRequest(Message):
    pass


class DeadLetters(Message):
    """Arrays: one uint8 frame of JSON."""


class Requeue(Message):
    """Draw the prompts of these dead groups again; none named: of all that can be."""

    groups: list[int] = []


class Requeued(Message):
    """`groups`: those that this request has re-queued."""

    groups: list[int]
