"""The dataset as the broker draws from it: rows in seeded epoch order, tokenised once, when they are drawn."""

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from april import wire
from april.broker.ledger.events import Event, Part, PromptSubmitted
from april.broker.ledger.state import LedgerState
from april.config import Config, ConfigError
from april.config.evaluation import EvaluationSet
from april.data.dataset import Dataset, load_dataset
from april.data.rows import BadRow, Row
from april.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ReadBack: TypeAlias = Callable[[Any], tuple[Event, list[Part]]]
"""the event behind a reference, and its arrays"""
ROWS_CACHED = 16_384
"""rows whose tokens are kept for the next epoch"""


@dataclass(frozen=True)
class HeldOut:
    """A set of prompts for evaluation."""

    asked: EvaluationSet
    rows: Dataset
    tokens: list[tuple[int, bytes]]
    """(position, token ids) of those that are short enough"""


class PromptBook:
    """Training prompts by (epoch, position), evaluation prompts by (number of their set, position)."""

    def __init__(self, config: Config):
        data = config.data
        allowed = config.reward.allowed
        self.rows = load_dataset(data.train_sources, data, allowed=allowed)
        self.tokenizer = Tokenizer(config.model.path)
        self.fingerprint = self.rows.fingerprint
        self.max_prompt_tokens = config.longest_prompt_tokens
        self.too_long: set[int] = set()
        """rows that were to be drawn, but have no token, or more than a prompt may have"""
        self.refused: set[int] = set()
        """rows that were to be drawn, but that the chat template refuses"""
        self._config = config
        self._tokens_of_row = lru_cache(maxsize=ROWS_CACHED)(self._encode_row)
        self._drawn = lru_cache(maxsize=16)(self._draw)
        """a schedule may look at the same prompt several times before it opens the group"""
        self.held_out = {one.number: self._held_out(one, allowed) for one in config.evaluation_sets}
        """by the number of the set, in order"""
        self.draw((0, 0))

    def draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        """(epoch, position, token ids) of the first prompt at the cursor or behind it that is short enough."""
        return self._drawn(cursor)

    def _draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        epoch, position = cursor
        for _ in range(2 * len(self.rows) + len(self._order(epoch))):
            if position >= len(self._order(epoch)):
                epoch, position = epoch + 1, 0
            if self._config.data.epochs is not None and epoch >= self._config.data.epochs:
                return None
            tokens = self._tokens_of_row(self.row_number(epoch, position))
            if tokens is not None:
                return epoch, position, tokens
            position += 1
        paths = ", ".join(str(source.path) for source in self._config.data.train_sources)
        raise ConfigError(
            f"no prompt of {paths} has between 1 and {self.max_prompt_tokens} tokens with the tokeniser of "
            f"{self._config.model.path}; mend the prompts, raise data.max_prompt_tokens, or lower "
            "sampling.max_response_tokens if the model's context is short"
        )

    def bind(self, ledger: LedgerState, read: ReadBack) -> None:
        """Where prompts are that the trainer has brought, and how they are read back."""

    def brought(self, message: wire.Submit, arrays: list[wire.Packed]) -> Iterator[tuple[PromptSubmitted, bytes]]:
        """What the trainer brings now, with token ids. Raises BadRow for what cannot be a prompt of this run."""
        raise BadRow("this run draws its prompts from files: set data.source to 'submitted' to bring them")

    def origin(self, row: int) -> tuple[int, bytes]:
        """(number, extra) of a prompt that the trainer has brought, -1 for others."""
        return -1, b""

    def row(self, epoch: int, position: int) -> Row:
        return self.rows[self.row_number(epoch, position)]

    def held_out_row(self, number: int, position: int) -> Row:
        return self.held_out[number].rows[position]

    def row_number(self, epoch: int, position: int) -> int:
        """Its place in the dataset, from 0, bad rows left out."""
        return int(self._order(epoch)[position])

    def counts(self) -> dict[str, int]:
        """Rows of the training prompts, those left out as bad, and those found too long (or empty) so far."""
        bad_rows = self.rows.bad_rows + len(self.refused)
        return {"rows": len(self.rows), "bad_rows": bad_rows, "too_long": len(self.too_long)}

    def _order(self, epoch: int) -> np.ndarray:
        return self.rows.order(self._config.seed, epoch)

    def _encode_row(self, number: int) -> bytes | None:
        try:
            tokens = self._encode(self.rows[number])
        except BadRow as error:
            if number not in self.refused:
                self.refused.add(number)
                log.warning("row %d skipped: %s", number, error)
            return None
        if tokens is None and number not in self.too_long:
            self.too_long.add(number)
            if len(self.too_long).bit_count() == 1:
                log.warning(
                    "prompt of row %d skipped, between 1 and %d tokens are wanted; %d of %d rows skipped so far",
                    number, self.max_prompt_tokens, len(self.too_long), len(self.rows),
                )  # fmt: skip
        return tokens

    def _held_out(self, asked: EvaluationSet, allowed: Collection[str]) -> HeldOut:
        rows = load_dataset([asked.source], self._config.data, asked.prompts, allowed)
        encoded = [(place, self._encode_held_out(rows, place)) for place in range(len(rows))]
        return HeldOut(asked, rows, [(place, tokens) for place, tokens in encoded if tokens is not None])

    def _encode_held_out(self, rows: Dataset, place: int) -> bytes | None:
        try:
            return self._encode(rows[place])
        except BadRow as error:
            raise ConfigError(f"held-out prompt {place}: {error}; mend it, or data.template_options") from None

    def _encode(self, row: Row) -> bytes | None:
        """Token ids; none of a row that is an agent's task, since the agent says what the policy is told."""
        if self._config.agent.is_set:
            return b""
        tokens = self.tokenizer.encode_prompt(row.prompt, self._config.data.template_options)
        return tokens.astype("<i4").tobytes() if 0 < len(tokens) <= self.max_prompt_tokens else None
