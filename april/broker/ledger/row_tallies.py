"""Results of the groups drawn so far, by dataset row, for samplers of prompts. Only the ledger's events change them, so
that journal or snapshot rebuild them exactly."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from april.broker.ledger.samples import Group

NEVER = -1
"""Value in `RowTallies.last` for a row that was never drawn."""
BLANK = {"last": NEVER, "known": 0, "accuracy": 0.0, "spread": 0.0}
"""Column name of `RowTallies` -> its value for a row that was never drawn."""


class RowTallies:
    """Columns with one entry per dataset row, at least up to the largest row drawn so far. A snapshot stores them up to
    that row only, so that its content depends on the events alone, and not on how many rows `first` was asked for.

    tallies.draw(7)
    tallies.complete(7, accuracies=[1.0, 0.0], rewards=[1.0, 0.0])
    tallies.accuracy[7]                        # 0.5
    """

    def __init__(self, stored: Iterable[Any] = (0, 0, b"", b"", b"", b"")):
        """`stored`: the values that a snapshot has stored, as iterating over a `RowTallies` yields them: draws,
        results, and the bytes of each column."""
        draws, results, last, known, accuracy, spread = stored
        self.draws: int = draws
        """Number of draws so far."""
        self.results: int = results
        """Number of complete groups so far."""
        self.last = np.frombuffer(last, "<i8")
        """Number of each row's last draw, from 0, or NEVER; int64 [n]."""
        self.known = np.frombuffer(known, "<i8")
        """Number of complete groups of each row; int64 [n]."""
        self.accuracy = np.frombuffer(accuracy, "<f8")
        """Moving mean of the accuracy of each row's complete groups: a new group weighs as much as all before it;
        float64 [n]."""
        self.spread = np.frombuffer(spread, "<f8")
        """Moving mean of the standard deviation of the rewards in each row's complete groups: a new group weighs as
        much as all before it; float64 [n]."""
        self._stored_rows = len(self.last)

    def __iter__(self) -> Iterator[int | bytes]:
        yield from (self.draws, self.results)
        yield from (getattr(self, name)[: self._stored_rows].tobytes() for name in BLANK)

    def draw(self, row: int) -> None:
        """Count a draw of a row."""
        self._touch(row)
        self.last[row] = self.draws
        self.draws += 1

    def complete(self, row: int, accuracies: Sequence[float], rewards: Sequence[float]) -> None:
        """Count a complete group of a row, by the accuracy and the reward of each of its samples, at least one."""
        self._touch(row)
        self.results += 1
        self.known[row] += 1
        share = 0.5 if self.known[row] > 1 else 1.0
        self.accuracy[row] += share * (float(np.mean(accuracies)) - self.accuracy[row])
        self.spread[row] += share * (float(np.std(rewards)) - self.spread[row])

    def complete_group(self, group: Group) -> None:
        """Count a complete group whose prompt a sampler has chosen; any other is not counted."""
        scored = [(sample.accuracy, sample.reward) for sample in group.samples if sample.reward is not None]
        if group.number >= 0 and scored:
            accuracies, rewards = zip(*scored, strict=True)
            self.complete(group.number, accuracies, rewards)

    def first(self, rows: int) -> "RowTallies":
        """Tallies of the first `rows` rows, drawn or not: read-only views of these columns. They show later draws and
        results until a row beyond the end of the columns is drawn, which replaces the columns."""
        self._hold(rows)
        found = RowTallies()
        found.draws, found.results = self.draws, self.results
        for name in BLANK:
            column = getattr(self, name)[:rows]
            column.flags.writeable = False
            setattr(found, name, column)
        return found

    def _touch(self, row: int) -> None:
        self._hold(row + 1)
        self._stored_rows = max(self._stored_rows, row + 1)

    def _hold(self, rows: int) -> None:
        """Make the columns writable, and long enough for `rows` rows: by a power of two, so that they seldom grow."""
        if rows <= len(self.last) and self.last.flags.writeable:
            return
        length = max(len(self.last), 1 << max(0, rows - 1).bit_length())
        for name, blank in BLANK.items():
            column = getattr(self, name)
            setattr(self, name, np.append(column, np.full(length - len(column), blank, column.dtype)))


class PromptOrder:
    """Order in which prompts are drawn. This class draws the prompt at the cursor; a subclass lets a sampler choose."""

    def choose(self, tallies: RowTallies, cursor: tuple[int, int]) -> tuple[int, int]:
        """(epoch, row) of the prompt to draw; `cursor` is (epoch, prompts drawn in it)."""
        return cursor

    def number_of(self, evaluation: bool, epoch: int, row: int) -> int:
        """Number in the dataset of the row at position `row` of an epoch's order, under which a sampler's results are
        tallied; -1 if they are not: always here, and in a subclass for a prompt of an `evaluation`."""
        return -1
