"""What carries weights over a lane: the learner hands in buckets of bytes, and they arrive at one worker.

Who is in which lane, versions, checksums and deadlines are not its business: what arrives damaged is found by its
checksum, and a lane that fails is given up and built anew.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from april.config import WeightsSection
from april.weights.lane_messages import LaneInvite

if TYPE_CHECKING:
    from torch import Tensor


class Link:
    """One side of a lane."""

    @abstractmethod
    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        """The learner's side: uint8 buckets on the CPU, in order, all of them by `deadline`, Unix time. Raises
        RuntimeError or OSError."""

    @abstractmethod
    def receive(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        """The worker's side: the same buckets, filled in place."""


class Transport:
    brings: ClassVar[bool] = True
    """weights come over its lanes; otherwise others load them into the engines, and a lane says when they have"""
    takes_servers: ClassVar[bool] = False
    """an inference server can take its worker's place in a lane, as `engine.weights` = 'broadcast' wants"""

    def __init__(self, config: WeightsSection):
        self.config = config

    @abstractmethod
    def meet(self, invite: LaneInvite, as_learner: bool, server_ranks: int = 0) -> Link:
        """Meet the other side of the lane that both were invited to, within `invite.timeout_s`; called in a thread of
        the lane. `server_ranks`: of the server that takes the worker's place. Raises RuntimeError or OSError."""
