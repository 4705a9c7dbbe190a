"""The dataset as the broker draws from it: rows in seeded epoch order, tokenised once, when they are drawn."""

import hashlib
import logging
from functools import lru_cache

import numpy as np

from april.config import Config, ConfigError
from april.data.prompts import Row, epoch_order, fingerprint, load_rows
from april.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ROWS_CACHED = 16_384
"""rows whose tokens are kept for the next epoch"""


class PromptBook:
    """Training prompts by (epoch, position), evaluation prompts by position."""

    def __init__(self, config: Config):
        data = config.data
        self.rows = load_rows(data.path, data.prompt_key, data.label_key)
        self.evaluation_rows: list[Row] = []
        if data.eval_path:
            rows = load_rows(data.eval_path, data.prompt_key, data.label_key)
            self.evaluation_rows = rows[: config.evaluation.prompts]
        self.tokenizer = Tokenizer(config.model.path)
        self.fingerprint = fingerprint(data.path)
        self.max_prompt_tokens = config.longest_prompt_tokens
        self.skipped_prompts = 0
        self._config = config
        self._order = lru_cache(maxsize=2)(self._epoch_order)
        self._tokens_of_row = lru_cache(maxsize=ROWS_CACHED)(lambda number: self._encode(self.rows[number]))
        self.draw = lru_cache(maxsize=16)(self._draw)
        """`Prompts.draw`; a schedule may look at the same prompt several times before it opens the group"""
        encoded = [(position, self._encode(row)) for position, row in enumerate(self.evaluation_rows)]
        self.evaluation_tokens = [(position, tokens) for position, tokens in encoded if tokens is not None]
        """(position, token ids) of the evaluation prompts that are short enough"""
        self.draw((0, 0))

    def _draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        """(epoch, position, token ids) of the first prompt at the cursor or behind it that is short enough."""
        epoch, position = cursor
        for _ in range(len(self.rows)):
            if position >= len(self.rows):
                epoch, position = epoch + 1, 0
            if self._config.data.epochs is not None and epoch >= self._config.data.epochs:
                return None
            tokens = self._tokens_of_row(self.row_number(epoch, position))
            if tokens is not None:
                return epoch, position, tokens
            position += 1
        raise ConfigError(
            f"no prompt of {self._config.data.path} has between 1 and {self.max_prompt_tokens} tokens with the "
            f"tokeniser of {self._config.model.path}; mend the prompts, raise data.max_prompt_tokens, or lower "
            "sampling.max_response_tokens if the model's context is short"
        )

    def row(self, epoch: int, position: int) -> Row:
        return self.rows[self.row_number(epoch, position)]

    def row_number(self, epoch: int, position: int) -> int:
        """Its place in the dataset, from 0."""
        return int(self._order(epoch)[position])

    def _epoch_order(self, epoch: int) -> np.ndarray:
        return epoch_order(len(self.rows), self._config.seed, epoch, self._config.data.shuffle)

    def _encode(self, row: Row) -> bytes | None:
        tokens = self.tokenizer.encode_prompt(row.prompt)
        if 0 < len(tokens) <= self.max_prompt_tokens:
            return tokens.astype("<i4").tobytes()
        self.skipped_prompts += 1
        if self.skipped_prompts.bit_count() == 1:
            log.warning(
                "prompt of %d tokens skipped, between 1 and %d are wanted; %d skipped so far",
                len(tokens), self.max_prompt_tokens, self.skipped_prompts,
            )  # fmt: skip
        return None


def sample_seed(run_seed: int, group: int, index: int) -> int:
    """A 63-bit sampling seed, distinct for every sample of a run and the same on every resume."""
    digest = hashlib.blake2b(f"{run_seed}/{group}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
