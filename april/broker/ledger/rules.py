"""The rules of a ledger, fixed for the whole run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """Settings that a ledger must keep over a run."""

    batch_groups: int
    """N: groups in a batch."""
    group_size: int
    """n: samples in a group."""
    max_staleness: int
    """S: largest staleness of a trained token, policy steps."""
    max_attempts: int = 5
    """Lost or failed leases after which a sample is dead."""
    min_group_size: int | None = None
    """Live samples with which a group goes on after others died; None: all of them."""
    max_response_tokens: int = 1 << 30
    """Longest response, observations included."""
    filtered: bool = False
    """Whether filters judge complete groups before they can be trained."""
    scored_apart: bool = False
    """Whether scorers score responses under a lease of their own, instead of the worker that generated them."""
    submitted: bool = False
    """Whether the trainer submits prompts during the run, so that running out of them does not end it."""
    keeps_discards: bool = False
    """Whether some discarded samples are passed to the learner, which stores them for reading."""
    agents: bool = False
    """Whether samples are agents' sessions, generated in turns with a lease each."""
