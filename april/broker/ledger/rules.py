"""The rules of a ledger, fixed for the whole run; cohorts of response lengths, and the interface of its prompts."""

from collections import Counter, deque
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
    """Longest response in tokens, observations included."""
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


# --- length cohorts ---------------------------------------------------------------------------------------------------


Lengths = Counter[int]
"""Number of responses by length in tokens."""

RECENT_BATCHES = 20
"""Length of each recent window of the length comparison, in batches' worth of groups: one window of trained groups, one
of created groups."""


class LengthCohorts:
    """Response lengths by cohort (groups created one after the other), to compare trained lengths with created ones.

    A cohort is settled once each of its groups is trained or discarded, so that short responses, which finish first,
    are never compared with longer ones still being generated.
    """

    def __init__(self, cohort_groups: int):
        self.cohort_groups = cohort_groups
        self.recent_groups = RECENT_BATCHES * cohort_groups
        """Most groups in each of the windows `lately_trained` and `lately_created`."""
        self.settled = 0
        """Number of settled cohorts; cohorts settle in order."""
        self.created: Lengths = Counter()
        self.trained: Lengths = Counter()
        self.waiting: dict[int, dict[int, tuple[list[int], list[int]]]] = {}
        """(created, trained) response lengths of each ended group in an unsettled cohort, by cohort and by the group's
        ordinal."""
        self.lately_trained: deque[list[int]] = deque(maxlen=self.recent_groups)
        self.lately_created: deque[list[int]] = deque(maxlen=self.recent_groups)
        """Response lengths of the newest trained groups (`lately_trained`), and of the newest groups in settled cohorts
        (`lately_created`), since the broker started."""

    def finish(self, ordinal: int, created: list[int], trained: list[int]) -> None:
        """Record that training group number `ordinal` has ended: `created` has the lengths of all its responses,
        `trained` those of the trained ones, in tokens.

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
