"""The rules of a ledger, fixed for the whole run, and the interface of its prompts."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Rules:
    """Settings that a ledger must keep over a run."""

    batch_groups: int
    """Number of groups in a batch (N)."""
    group_size: int
    """Number of samples in a group (n)."""
    max_staleness: int
    """Largest staleness of a trained token in policy steps (S)."""
    max_attempts: int = 5
    """Number of lost or failed leases after which a sample is dead."""
    min_group_size: int | None = None
    """Least number of live samples with which a group continues after others died; None: every sample is needed."""
    max_response_tokens: int = 1 << 30
    """Limit on a response's length in tokens, observations included."""
    filtered: bool = False
    """Whether group filters judge complete groups before the groups can be trained."""
    scored_apart: bool = False
    """Whether scorers score responses under a separate lease; otherwise the worker that generated a response scores
    it."""
    submitted: bool = False
    """Whether the trainer submits prompts during the run, so that the run does not end when no prompt is left."""
    keeps_discards: bool = False
    """Whether some discarded samples are sent to the learner, which stores them in the sample logs."""
    agents: bool = False
    """Whether samples are agents' sessions, generated in turns with a lease each."""


class Prompts(Protocol):
    """The source of prompts for new groups, in the order in which they are drawn."""

    def draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        """(epoch, position in its order, int32 token ids) of the first usable prompt from `cursor`, (epoch, position),
        on; None if no prompt is left."""
