"""The interface of weight transports: the learner passes in buckets of bytes, which arrive at one worker.

A transport knows nothing of versions, checksums or membership. Damaged data is detected by checksum elsewhere, and a
channel that fails is dropped and built anew.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from april.config import WeightsSection
from april.weights.lane_messages import ChannelInvite

if TYPE_CHECKING:
    from torch import Tensor


class Link:
    """One side of an open weight channel."""

    @abstractmethod
    def send(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        """The learner's side: send uint8 buckets on the CPU, in order, by `deadline` (Unix time, seconds). Raises
        RuntimeError or OSError."""

    @abstractmethod
    def receive(self, buckets: "Iterable[Tensor]", deadline: float) -> None:
        """The worker's side: fill the same buckets in place, by `deadline`."""


class Transport:
    """Opens links of weight channels; base class of the registry `weights.transport`."""

    carries_weights: ClassVar[bool] = True
    """Whether the channels carry weights; otherwise the trainer loads them, and a channel only signals when it has."""
    takes_servers: ClassVar[bool] = False
    """Whether an inference server can take its worker's place in a channel (`engine.weights` = 'broadcast')."""

    def __init__(self, config: WeightsSection):
        self.config = config

    @abstractmethod
    def meet(self, invite: ChannelInvite, as_learner: bool, server_ranks: int = 0) -> Link:
        """Connect to the other side of the channel within `invite.timeout_s`; called in the channel's thread.

        `server_ranks`: ranks of the server that takes the worker's place; 0 if none does. Raises RuntimeError or
        OSError.
        """
