"""What the journal and the dataset hold of a sample: prompts, tokens, rows, the states of environments."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from zlib_ng.zlib_ng import crc32

from april import wire
from april.broker.journal.files import Reference
from april.broker.journal.journal import Journal
from april.broker.ledger.events import RowsAccepted
from april.broker.ledger.places import Place
from april.broker.ledger.samples import Sample
from april.broker.prompts import PromptBook
from april.data.rows import GROUP_REWARD, Row
from april.wire.rows import TABLE, padded_sizes

ROWS_CACHED, TABLES_CACHED = 16, 64
PROMPTS_CACHED, LONG_PROMPTS_CACHED, LONG_PROMPT_BYTES = 1024, 16, 16 << 10
"""short ones until their batch is delivered, long ones while the samples of their group are handed out"""


class Payloads:
    def __init__(self, journal: Journal, prompts: PromptBook, default_reward: str, is_cut: bool):
        """`default_reward`: name of the verifier of rows that name none; `is_cut`: training tokens have supports."""
        self.journal = journal
        self.prompts = prompts
        self.default_reward = default_reward
        self.is_cut = is_cut
        self.row_of = lru_cache(maxsize=ROWS_CACHED)(self._row_of)
        """the samples of a group are mostly handed out one after the other"""
        self._times_of = lru_cache(maxsize=TABLES_CACHED)(self._read_times)
        """a worker reports the chunks of all its samples together"""
        self._short_prompt = lru_cache(maxsize=PROMPTS_CACHED)(self._read_prompt)
        self._long_prompt = lru_cache(maxsize=LONG_PROMPTS_CACHED)(self._read_prompt)

    def prompt(self, reference: Reference) -> wire.Packed:
        """Prompt ids by their place in the journal."""
        _, length = reference
        return self._short_prompt(reference) if length < LONG_PROMPT_BYTES else self._long_prompt(reference)

    def _read_prompt(self, reference: Reference) -> wire.Packed:
        _, [(checksum, data)] = self.journal.read(reference)
        return wire.Packed("i4", checksum, data)

    def response(self, places: Iterable[Place]) -> list[wire.Packed]:
        """Ids and behaviour log-probabilities of a training sample's acknowledged tokens, and their supports where they
        have some."""
        columns: list[list[memoryview]] = [[], [], [], []] if self.is_cut else [[], []]
        for place, payload in self.journal.read_payloads(places):
            end = 4 * place.tokens
            columns[0].append(payload[:end])
            if place.observed:
                for column in columns[1:3]:
                    column.append(memoryview(bytes(end)))
                continue
            columns[1].append(payload[end : 2 * end])
            if self.is_cut:
                columns[2].append(payload[2 * end : 3 * end])
                columns[3].append(payload[3 * end :])
        return [pack(dtype, pieces) for dtype, pieces in zip(wire.TOKEN_ARRAYS, columns, strict=False)]

    def response_ids(self, sample: Sample) -> wire.Packed:
        """int32 [T]: all its acknowledged tokens, without more."""
        return pack("i4", [payload[: 4 * place.tokens] for place, payload in self.journal.read_payloads(sample.places)])

    def times(self, places: Iterable[Place]) -> list[tuple[int, float]]:
        """(response tokens that there were, Unix seconds by the clock of whoever had it) of each chunk; 0 s where that
        cannot be read."""
        found, end = [], 0
        for place in places:
            end += place.tokens
            found.append((end, self._times_of(place.record).get(place.offset, 0.0)))
        return found

    def _read_times(self, record: int) -> dict[int, float]:
        """Of a record's rows, by where their payloads are."""
        event, begin = self.journal.read_event(record)
        if not isinstance(event, RowsAccepted):
            return {}
        table = np.frombuffer(event.table, TABLE)
        sizes = padded_sizes(table)
        return dict(zip((begin + np.cumsum(sizes) - sizes).tolist(), table["time"].tolist(), strict=True))

    def environment_state(self, sample: Sample) -> bytes:
        """What its environment has left behind its last observation."""
        last = [place for place in sample.places if place.observed][-1:]
        return b"".join(payload[4 * place.tokens :] for place, payload in self.journal.read_payloads(last))

    def _row_of(self, evaluation: bool, epoch: int, row: int) -> Row:
        return self.prompts.held_out_row(epoch, row) if evaluation else self.prompts.row(epoch, row)

    def reward_of(self, row: Row) -> str:
        """Name of its verifier."""
        return row.reward or self.default_reward

    def scored_together(self, evaluation: bool, epoch: int, row: int) -> bool:
        """Whether the verifier of a row sees all responses of a group at once."""
        return self.reward_of(self.row_of(evaluation, epoch, row)).startswith(GROUP_REWARD)


def pack(dtype: str, pieces: list[memoryview]) -> wire.Packed:
    data = b"".join(pieces)
    return wire.Packed(dtype, crc32(data), data)
