"""Samples that failed for good: what is known of them, and the prompts of their groups that are to be drawn again."""

import msgspec

from april.broker.ledger.samples import Sample

KEPT = 1000
"""letters that are remembered, the newest; an older one can be listed and re-queued no more"""
ERROR_CHARS = 500
"""what is kept of an error"""


class DeadLetter(msgspec.Struct, frozen=True):
    """A sample that has used up its attempts."""

    group: int
    index: int
    evaluation: bool
    epoch: int
    row: int
    """place of the prompt in the order of its epoch"""
    attempts: int
    error: str
    """of the last attempt"""
    at: float
    """when it died, Unix seconds"""
    outcome: str
    """without_it: its group, or the evaluation, goes on | discarded: with its group | requeued: to be drawn again |
    redrawn: as a new group"""


class DeadLetters(msgspec.Struct):
    """A letter for each dead sample; a discarded group can be re-queued once.

    letters.add(sample, at)             # outcome: without_it
    letters.discard(group)              #          discarded
    letters.requeue(group)              #          requeued; its prompt waits to be drawn again
    letters.drawn(group)                #          redrawn
    """

    letters: list[DeadLetter] = []
    total: int = 0
    """letters ever written"""
    waiting: dict[int, tuple[int, int]] = {}
    """(epoch, row) of the prompts to draw again by the group that died, in the order of their re-queueing"""

    def add(self, sample: Sample, at: float) -> None:
        group = sample.group
        place = group.id, sample.index, group.evaluation, group.epoch, group.row
        self.letters.append(DeadLetter(*place, sample.attempts, sample.last_error[:ERROR_CHARS], at, "without_it"))
        self.total += 1
        del self.letters[:-KEPT]

    def discard(self, group: int) -> None:
        self._mark(group, "discarded")

    def requeue(self, group: int) -> None:
        if letter := self.of_group(group):
            self.waiting[group] = (letter.epoch, letter.row)
        self._mark(group, "requeued")

    def drawn(self, group: int) -> None:
        del self.waiting[group]
        self._mark(group, "redrawn")

    def _mark(self, group: int, outcome: str) -> None:
        self.letters = [
            msgspec.structs.replace(letter, outcome=outcome) if letter.group == group else letter
            for letter in self.letters
        ]

    def of_group(self, group: int) -> DeadLetter | None:
        return next((letter for letter in self.letters if letter.group == group), None)

    def discarded_groups(self) -> list[int]:
        """Those that can be re-queued, oldest first."""
        return list(dict.fromkeys(letter.group for letter in self.letters if letter.outcome == "discarded"))

    def waiting_at(self, epoch: int, row: int) -> int | None:
        """The re-queued group that waits for this prompt to be drawn."""
        return next((group for group, place in self.waiting.items() if place == (epoch, row)), None)
