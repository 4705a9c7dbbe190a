"""Rows of conversations for supervised training, as tokens by row number, and the row number at each position of the
seeded orders of all epochs."""

import logging
from collections.abc import Iterable
from functools import lru_cache

from april.config import Config, SourceSection
from april.data.conversations import Conversation, ConversationEncoder, load_conversations
from april.data.rows import BadRow
from april.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ROWS_CACHED = 16_384
"""Number of rows whose tokens are kept in memory for the next epoch."""


class ConversationRows:
    """The rows of all sources of conversations, tokenised on demand.

    rows = ConversationRows(config.data.train_sources, config)
    for number, conversation in rows.at(range(0, 32)):       # those that can be trained
        conversation.tokens
    """

    def __init__(self, sources: list[SourceSection], config: Config, tokenizer: Tokenizer | None = None):
        """Read all rows of `sources`. `tokenizer`: None: that of `model.path`. Raises ConfigError."""
        self.rows, self.seed = load_conversations(sources, config.data, config.sft), config.seed
        self.max_tokens = min(config.sft.max_tokens, config.context_tokens or config.sft.max_tokens)
        self.encoder = ConversationEncoder(tokenizer or Tokenizer(config.model.path), config.data, config.sft)
        self.left_out: dict[str, set[int]] = {"too_long": set(), "bad_rows": set()}
        """Numbers of the rows that were left out so far, by reason."""
        self._usable = lru_cache(ROWS_CACHED)(self._encode)

    @property
    def per_epoch(self) -> int:
        return len(self.rows.order(self.seed, 0))

    def at(self, positions: Iterable[int]) -> list[tuple[int, Conversation]]:
        """(row number, tokens) of the rows at `positions`: indices into the orders of all epochs, laid end to end. A
        row that cannot be trained is left out and counted."""
        return [(number, row) for number in self.numbers(positions) if (row := self._usable(number)) is not None]

    def reasons(self, positions: Iterable[int]) -> list[str]:
        """Reasons ("too_long" or "bad_rows") for which `at` has left out rows at these positions, one for each row left
        out."""
        numbers = self.numbers(positions)
        return [reason for reason, rows in self.left_out.items() for number in numbers if number in rows]

    def numbers(self, positions: Iterable[int]) -> list[int]:
        """Numbers of the rows at `positions`: indices into the orders of all epochs, laid end to end."""
        orders = [divmod(position, self.per_epoch) for position in positions]
        return [int(self.rows.order(self.seed, epoch)[position]) for epoch, position in orders]

    def _encode(self, number: int) -> Conversation | None:
        try:
            row = self.encoder.encode(self.rows[number])
        except BadRow as error:
            log.warning("row %d is left out: %s", number + 1, error)
            self.left_out["bad_rows"].add(number)
            return None
        if len(row.tokens) <= self.max_tokens:
            return row
        too_long = self.left_out["too_long"]
        too_long.add(number)
        if len(too_long).bit_count() == 1:
            log.warning("row %d is left out: %d tokens are more than %d", number + 1, len(row.tokens), self.max_tokens)
        return None
