"""The dead-letter queue: samples that used up their attempts, and prompts of their groups to be drawn again."""

import msgspec

from april.broker.ledger.samples import Sample

MAX_LETTERS = 1000
"""Most dead letters kept, the newest; older ones can no longer be listed or re-queued."""
DEAD_ROUNDS = 2
"""Number of groups discarded in a row, each because a sample failed for good, at which the run fails; given as a
multiple of the groups that a round opens."""
ERROR_CHARS = 500
"""Most characters kept of an error text."""


class DeadLetter(msgspec.Struct, frozen=True):
    """A sample that has used up its attempts."""

    group: int
    index: int
    evaluation: bool
    epoch: int
    row: int
    """Position of the sample's prompt in the order of its epoch."""
    attempts: int
    error: str
    """Error of the last attempt."""
    at: float
    """Time of the last attempt's end, Unix seconds."""
    outcome: str
    """Consequence of the sample's death: without_it: the group or evaluation continues without it | discarded: its
    group was discarded | requeued: its prompt waits to be drawn again | redrawn: its prompt has a new group"""


class DeadLetterQueue(msgspec.Struct):
    """The dead letters: one for each dead sample. The prompt of a group discarded for a dead sample can be queued once
    to be drawn again.

    letters.add(sample, at)             # outcome: without_it
    letters.discard(group)              #          discarded
    letters.requeue(group)              #          requeued; its prompt waits to be drawn again
    letters.drawn(group)                #          redrawn
    """

    letters: list[DeadLetter] = []
    total: int = 0
    """Number of dead letters ever written."""
    groups_in_a_row: int = 0
    """Number of groups discarded because a sample failed for good, since a group was last complete."""
    last_error: str = ""
    """Error of the last failed attempt of any sample."""
    requeued: dict[int, tuple[int, int]] = {}
    """(epoch, row) of each prompt to draw again, by the id of its discarded group, in order of re-queueing."""

    def add(self, sample: Sample, at: float) -> None:
        group = sample.group
        location = group.id, sample.index, group.evaluation, group.epoch, group.row
        self.letters.append(DeadLetter(*location, sample.attempts, sample.last_error[:ERROR_CHARS], at, "without_it"))
        self.total += 1
        del self.letters[:-MAX_LETTERS]

    def discard(self, group: int) -> None:
        self._mark(group, "discarded")

    def requeue(self, group: int) -> None:
        if letter := self.find(group):
            self.requeued[group] = (letter.epoch, letter.row)
        self._mark(group, "requeued")

    def drawn(self, group: int) -> None:
        del self.requeued[group]
        self._mark(group, "redrawn")

    def _mark(self, group: int, outcome: str) -> None:
        self.letters = [
            msgspec.structs.replace(letter, outcome=outcome) if letter.group == group else letter
            for letter in self.letters
        ]

    def find(self, group: int) -> DeadLetter | None:
        """The first dead letter of a group; None if there is none."""
        return next((letter for letter in self.letters if letter.group == group), None)

    def discarded_groups(self) -> list[int]:
        """Ids of the groups that can be re-queued, oldest first."""
        return list(dict.fromkeys(letter.group for letter in self.letters if letter.outcome == "discarded"))

    def requeued_group_at(self, epoch: int, row: int) -> int | None:
        """Id of the re-queued group whose prompt is at (epoch, row); None if there is none."""
        return next((group for group, prompt in self.requeued.items() if prompt == (epoch, row)), None)
