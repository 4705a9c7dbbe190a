"""The rules of a ledger, fixed for the whole run; cohorts of response lengths, and the interface of its prompts."""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Protocol


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


# --- length cohorts ---------------------------------------------------------------------------------------------------


Lengths = Counter[int]
"""Number of responses by length in tokens."""

RECENT_BATCHES = 20
"""Batches' worth of groups kept for the recent comparison, of trained and of created groups each."""


class LengthCohorts:
    """Response lengths by cohort of creation, to compare the lengths that are trained with those that are generated.

    A cohort is settled once each of its groups is trained or discarded, so that short responses, which finish first,
    are never compared with longer ones still being generated.
    """

    def __init__(self, cohort_groups: int):
        self.cohort_groups = cohort_groups
        self.recent_groups = RECENT_BATCHES * cohort_groups
        """Capacity of `lately_trained` and `lately_created`."""
        self.settled = 0
        """Cohorts settled so far; they settle in order."""
        self.created: Lengths = Counter()
        self.trained: Lengths = Counter()
        self.waiting: dict[int, dict[int, tuple[list[int], list[int]]]] = {}
        """(created, trained) lengths of ended groups in unsettled cohorts, by cohort and ordinal."""
        self.lately_trained: deque[list[int]] = deque(maxlen=self.recent_groups)
        self.lately_created: deque[list[int]] = deque(maxlen=self.recent_groups)
        """Response lengths of the newest trained groups, and of the newest groups in settled cohorts, since the broker
        started."""

    def finish(self, ordinal: int, created: list[int], trained: list[int]) -> None:
        """Record the end of group number `ordinal`: lengths of all its responses and of the trained ones, in tokens.

        Idempotent: a restarted learner trains groups again.
        """
        cohort = ordinal // self.cohort_groups
        if cohort < self.settled:
            return
        ended = self.waiting.setdefault(cohort, {})
        if trained and ordinal not in ended:
            self.lately_trained.append(trained)
        ended[ordinal] = (created, trained)
        while len(self.waiting.get(self.settled, ())) == self.cohort_groups:
            for group_created, group_trained in self.waiting.pop(self.settled).values():
                self.created.update(group_created)
                self.lately_created.append(group_created)
                self.trained.update(group_trained)
            self.settled += 1


# --- prompts ----------------------------------------------------------------------------------------------------------


class Prompts(Protocol):
    """The source of prompts for new groups, in the order in which they are drawn."""

    def draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        """(epoch, row position, int32 token ids) of the first usable prompt from the cursor on; None if exhausted."""
