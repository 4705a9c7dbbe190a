"""Prompts that the trainer submits during the run, instead of a dataset: `data.source = "submitted"`."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from april import wire
from april.broker.ledger.events import PromptSubmitted
from april.broker.ledger.state import LedgerState
from april.broker.prompts import PromptBook, ReadBack
from april.config import Config
from april.data.rows import BadRow, DatasetRow, checked_label, checked_reward

PROMPTS_CACHED = 64


class SubmittedPrompts(PromptBook):
    """Training prompts by (0, number), each read from its record in the journal.

    prompts = SubmittedPrompts(config)
    prompts.bind(ledger, journal.read)
    for prompt, tokens in prompts.decode_submission(message, arrays):
        ledger.submit(prompt, tokens)
    prompts.draw((0, 0))                    # (0, 0, tokens)
    """

    def __init__(self, config: Config):
        self._ledger: LedgerState | None = None
        super().__init__(config)
        self.fingerprint = "submitted"
        self._allowed = config.reward.allowed
        self._largest_id = (config.vocabulary or 1 << 31) - 1

    def bind(self, ledger: LedgerState, read: ReadBack) -> None:
        self._ledger = ledger
        self._read = lru_cache(maxsize=PROMPTS_CACHED)(lambda number: read(ledger.submitted[number]))

    def draw(self, cursor: tuple[int, int]) -> tuple[int, int, bytes] | None:
        _, number = cursor
        if self._ledger is None or number not in self._ledger.submitted:
            return None
        _, [(_, tokens)] = self._read(number)
        return 0, number, bytes(tokens)

    def row(self, epoch: int, position: int) -> DatasetRow:
        prompt = self._prompt(position)
        return DatasetRow("", prompt.label, prompt.reward or None)

    def submission(self, row: int) -> tuple[int, bytes]:
        return row, self._prompt(row).extra

    def _prompt(self, number: int) -> PromptSubmitted:
        event, _ = self._read(number)
        assert isinstance(event, PromptSubmitted)
        return event

    def counts(self) -> dict[str, int]:
        return super().counts() | {"rows": self._ledger.prompts_submitted if self._ledger else 0}

    def decode_submission(
        self, message: wire.Submit, arrays: list[wire.PackedArray]
    ) -> Iterator[tuple[PromptSubmitted, bytes]]:
        lengths = [prompt.prompt_tokens for prompt in message.prompts]
        if [array.dtype for array in arrays] != ["i4"] or sum(lengths) * 4 != len(arrays[0].data):
            raise BadRow("prompts come with one array, of as many token ids as they say")
        if not all(1 <= length <= self.max_prompt_tokens for length in lengths):
            raise BadRow(f"a prompt has between 1 and {self.max_prompt_tokens} tokens")
        ids = np.frombuffer(arrays[0].data, "<i4")
        if len(ids) and not (ids.min() >= 0 and ids.max() <= self._largest_id):
            raise BadRow(f"token ids of a prompt are between 0 and {self._largest_id}")
        for prompt in message.prompts:
            checked_label(prompt.label, "label")
            checked_reward(prompt.reward or None, self._allowed)
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        return (
            (
                PromptSubmitted(number, prompt.label, prompt.reward, prompt.extra),
                ids[end - prompt.prompt_tokens : end].tobytes(),
            )
            for number, (prompt, end) in enumerate(zip(message.prompts, ends, strict=True), message.first)
        )


def open_prompts(config: Config) -> PromptBook:
    """The prompt source that `data.source` selects."""
    return (SubmittedPrompts if config.data.source == "submitted" else PromptBook)(config)
