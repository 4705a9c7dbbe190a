"""Draws prompts by weight: the next one is that whose weight times age is largest.

The age of a prompt is the number of draws since its own last one. So a prompt is drawn in proportion to its weight: one
of weight w on average every C / w draws, C the sum of all weights. The choice is a function of the seed and of the
ledger's state alone: a journal that is replayed draws the same prompts.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from april.broker.ledger.row_tallies import NEVER, PromptOrder, RowTallies
from april.broker.samplers import SAMPLERS
from april.config import ConfigError, ScheduleSection
from april.config.section import bound
from april.util.errors import refuse

Cursor = tuple[int, int]


class SamplerFailed(ConfigError):
    """A sampler that raised an exception, or returned something other than weights; the text names it."""


class SampledOrder(PromptOrder):
    """Chooses prompts by a sampler.

    draws = SampledOrder(config.schedule, rows=1000, order=dataset_order, is_usable=has_tokens)
    epoch, position = draws.choose(ledger.tallies, cursor)
    """

    def __init__(
        self, section: ScheduleSection, rows: int, order: Callable[[int], np.ndarray], is_usable: Callable[[int], bool]
    ):
        """`order(epoch)`: the rows of an epoch in their seeded order, some several times if sources have weights;
        `is_usable(row)`: whether a row can be drawn."""
        self.sampler = bound(SAMPLERS.find(section.sampler), section)
        self.name, self.floor, self.rows = section.sampler, section.sampler_floor, rows
        self.order, self.is_usable = order, is_usable
        self._unusable = np.zeros(rows, bool)
        self._positions = lru_cache(maxsize=2)(self._first_positions)
        self._chosen: tuple[Any, Cursor] | None = None
        """(state that determines the choice, result) of the last call of `choose`; the result is reused while the state
        is the same."""

    def choose(self, tallies: RowTallies, cursor: Cursor) -> Cursor:
        """(epoch, position in the epoch's seeded order) of the prompt to draw, where `cursor` is (epoch, prompts drawn
        in it). Raises SamplerFailed."""
        epoch, drawn = cursor if cursor[1] < len(self.order(cursor[0])) else (cursor[0] + 1, 0)
        state = tallies.draws, tallies.results, epoch, drawn
        if self._chosen is None or self._chosen[0] != state or not self.is_usable(self._row(self._chosen[1])):
            self._chosen = state, (epoch, self._position(tallies.first(self.rows), epoch))
        return self._chosen[1]

    def _row(self, chosen: Cursor) -> int:
        epoch, position = chosen
        return int(self.order(epoch)[position])

    def number_of(self, evaluation: bool, epoch: int, row: int) -> int:
        return -1 if evaluation else self._row((epoch, row))

    def _position(self, tallies: RowTallies, epoch: int) -> int:
        """Choose the row to draw; returns the first position of this row in the epoch's order, or 0 if no row can be
        drawn."""
        positions = self._positions(epoch)
        urgency = self.weights(tallies)
        urgency *= tallies.draws - tallies.last
        np.putmask(urgency, tallies.last == NEVER, np.inf)
        np.putmask(urgency, self._unusable | (positions < 0), -1.0)
        while (largest := urgency.max(initial=-1.0)) >= 0:
            position = int(positions[np.flatnonzero(urgency == largest)].min())
            row = self._row((epoch, position))
            if self.is_usable(row):
                return position
            self._unusable[row], urgency[row] = True, -1.0
        return 0

    def _first_positions(self, epoch: int) -> np.ndarray:
        """The first position of each row in an epoch's order, int64 [rows]; -1 for one that is not in it."""
        order = self.order(epoch)
        positions = np.full(self.rows, -1)
        positions[order[::-1]] = np.arange(len(order))[::-1]
        return positions

    def weights(self, tallies: RowTallies) -> np.ndarray:
        """The weight of each row, float64 [rows], from `schedule.sampler_floor` to 1. Raises SamplerFailed."""
        try:
            found = np.asarray(self.sampler(tallies), float)
        except Exception as error:
            raise SamplerFailed(f"the sampler {self.name} failed: {type(error).__name__}: {error}") from error
        weights = np.where(tallies.known > 0, found, 1.0) if found.shape == (self.rows,) else np.full(1, np.nan)
        if not (weights.min() >= 0 and weights.max() <= 1):
            raise SamplerFailed(f"the sampler {self.name} did not return {self.rows} weights from 0 to 1; mend it")
        return np.maximum(weights, self.floor, out=weights)


def draws_in_order(section: ScheduleSection) -> bool:
    """Whether the sampler of [schedule] draws prompts in the seeded order of each epoch, independent of results."""
    return bool(getattr(SAMPLERS.find(section.sampler), "in_order", False))


def check_sampler(section: ScheduleSection, submitted: bool) -> None:
    """Try the sampler that `section` names on three invented rows. Raises ConfigError if it cannot be found, fails in
    that trial, or has no rows to choose from, because the trainer brings the prompts (`submitted`)."""
    if draws_in_order(section):
        return
    if submitted:
        refuse(
            "schedule.sampler",
            section.sampler,
            "chooses among rows of files, and with data.source = 'submitted' the trainer brings the prompts",
            "leave it out",
        )
    tallies = RowTallies()
    for row, rewards in enumerate(([0.0, 0.0], [1.0, 0.0])):
        tallies.draw(row)
        tallies.complete(row, rewards, rewards)
    SampledOrder(section, 3, lambda epoch: np.arange(3), lambda row: True).choose(tallies, (0, 2))
