"""Reads the data of samples from journal and dataset: prompt, tokens, dataset row, environment state."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, chain, pairwise

import numpy as np
from zlib_ng.zlib_ng import crc32

from april import wire
from april.broker.images import ImageStore
from april.broker.journal.files import Damaged, Reference
from april.broker.journal.journal import Journal
from april.broker.ledger.chunk_refs import ChunkRef
from april.broker.ledger.events import RowsAccepted, TokensScored
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import Sample
from april.broker.prompts import PromptBook
from april.config import Config
from april.data.rows import DatasetRow
from april.util.text import GROUP_REWARD
from april.wire.rows import TABLE, padded_sizes

log = logging.getLogger(__name__)

ROWS_CACHED, TABLES_CACHED, SCORES_CACHED = 16, 64, 4
PROMPTS_CACHED, LONG_PROMPTS_CACHED, LONG_PROMPT_BYTES = 1024, 16, 16 << 10
"""Number of short and of long prompts in the caches, and the bytes from which on a prompt counts as long. Short prompts
are cached until their batch is delivered, long ones while leases on their group are granted."""


class Payloads:
    """Reader of prompts, tokens and rows, with small caches."""

    def __init__(self, config: Config, journal: Journal, prompts: PromptBook):
        self.journal = journal
        self.prompts = prompts
        self.images = prompts.image_store or ImageStore(config.run_dir)
        if config.agent.is_set or config.data.source == "submitted":
            self.images.pin_all()
        self.default_reward = config.reward.name
        """Name of the verifier that scores the dataset rows which name none."""
        self.is_cut = config.sampling.is_cut
        """Whether the run truncates the sampling distribution, so that training tokens have supports."""
        self.row_of = lru_cache(maxsize=ROWS_CACHED)(self._row_of)
        """Function (evaluation, epoch, row) -> dataset row of a prompt; cached, as the samples of a group are mostly
        leased one after the other."""
        self._times_of = lru_cache(maxsize=TABLES_CACHED)(self._read_times)
        """Function (position of a journal record) -> sampling time of each of its rows, by the offset of the row's
        payload; cached, as a worker reports the chunks of all its samples in one record."""
        self._scores_of = lru_cache(maxsize=SCORES_CACHED)(self._read_scores)
        """Function (reference of a journal record) -> token scores and feedback of each response in it; cached, as the
        samples of a group may share a record."""
        self._short_prompt = lru_cache(maxsize=PROMPTS_CACHED)(self._read_prompt)
        self._long_prompt = lru_cache(maxsize=LONG_PROMPTS_CACHED)(self._read_prompt)

    def bind(self, ledger: Ledger) -> None:
        """Connect prompts and ledger: submitted prompts are read from the journal by the ledger's references, and the
        ledger has the images of a prompt put on disk before it opens a group."""
        self.prompts.bind(ledger, self.journal.read)
        ledger.keep_images = self.prompts.keep_images

    def prompt(self, reference: Reference) -> wire.PackedArray:
        """Token ids of a prompt, int32, read by the reference of its journal record."""
        _, length = reference
        return self._short_prompt(reference) if length < LONG_PROMPT_BYTES else self._long_prompt(reference)

    def _read_prompt(self, reference: Reference) -> wire.PackedArray:
        _, [(checksum, data)] = self.journal.read(reference)
        return wire.PackedArray("i4", checksum, data)

    def response(self, refs: Iterable[ChunkRef], evaluation: bool = False) -> list[wire.PackedArray]:
        """Token ids and behaviour log-probabilities of a sample, and the supports if the run truncates the sampling
        distribution.

        Arrays: ids int32 [T], log-probabilities float32 [T], support sizes int32 [T], concatenated support ids int32.
        Log-probability and support size of an observed token are 0, and so are all support sizes of an evaluation.
        """
        columns: list[list[memoryview]] = [[], [], [], []] if self.is_cut else [[], []]
        for ref, payload in self.journal.read_payloads(refs):
            end = 4 * ref.tokens
            columns[0].append(payload[:end])
            if ref.observed:
                for column in columns[1:3]:
                    column.append(memoryview(bytes(end)))
                continue
            columns[1].append(payload[end : 2 * end])
            if self.is_cut:
                columns[2].append(memoryview(bytes(end)) if evaluation else payload[2 * end : 3 * end])
                columns[3].append(payload[len(payload) if evaluation else 3 * end :])
        return [pack(dtype, pieces) for dtype, pieces in zip(wire.TOKEN_ARRAYS, columns, strict=False)]

    def response_ids(self, sample: Sample) -> wire.PackedArray:
        """Token ids of the whole response, int32 [T]."""
        return pack("i4", [payload[: 4 * ref.tokens] for ref, payload in self.journal.read_payloads(sample.chunk_refs)])

    def token_scores(self, sample: Sample) -> dict[str, memoryview]:
        """Values, float32, of each token score of a sample, by name."""
        return self._scored(sample)[0]

    def feedback(self, sample: Sample) -> str:
        """Text that a sample's verifier gave beside the reward; "" for none."""
        return self._scored(sample)[1]

    def _scored(self, sample: Sample) -> tuple[dict[str, memoryview], str]:
        forks, found = sample.session_sample.sampled_forks, (sample.group.token_scores or {}).get(sample.index)
        if not found or sample not in forks:
            return {}, ""
        position, length, first, _ = found
        return self._scores_of((position, length))[first + forks.index(sample)]

    def _read_scores(self, reference: Reference) -> list[tuple[dict[str, memoryview], str]]:
        """Token scores of each response in a journal record, and the feedback on it."""
        event, [(_, data)] = self.journal.read(reference)
        assert isinstance(event, TokensScored)
        columns = split_columns(event.columns, memoryview(data))
        return list(zip(columns, event.feedback or [""] * len(columns), strict=True))

    def chunk_times(self, refs: Iterable[ChunkRef]) -> list[tuple[int, float]]:
        """(response tokens up to the chunk's end, time of the chunk) for each chunk; the time is in Unix seconds by the
        reporter's clock, 0 if it cannot be read."""
        times, end = [], 0
        for ref in refs:
            end += ref.tokens
            times.append((end, self._times_of(ref.record).get(ref.offset, 0.0)))
        return times

    def _read_times(self, record: int) -> dict[int, float]:
        """Sampling time, Unix seconds, of each row in the journal record at position `record`, by the offset of the
        row's payload from the start of the record. Empty if the record is damaged or has no rows."""
        event, begin = self.journal.read_event(record)
        if not isinstance(event, RowsAccepted):
            return {}
        table = np.frombuffer(event.table, TABLE)
        sizes = padded_sizes(table)
        return dict(zip((begin + np.cumsum(sizes) - sizes).tolist(), table["time"].tolist(), strict=True))

    def environment_state(self, sample: Sample) -> bytes:
        """The environment's state, stored after the tokens of the last observation; empty without one."""
        last = [ref for ref in sample.chunk_refs if ref.observed][-1:]
        return b"".join(payload[4 * ref.tokens :] for ref, payload in self.journal.read_payloads(last))

    def metrics_line(self, reference: Reference) -> bytes | None:
        """A line of metrics.jsonl; None if it is damaged."""
        try:
            _, [(_, data)] = self.journal.read(reference)
        except Damaged as error:
            log.warning("a line of metrics.jsonl cannot be restored: %s", error)
            return None
        return bytes(data)

    def _row_of(self, evaluation: bool, epoch: int, row: int) -> DatasetRow:
        return self.prompts.held_out_row(epoch, row) if evaluation else self.prompts.row(epoch, row)

    def reward_of(self, row: DatasetRow) -> str:
        """Name of the verifier of a dataset row."""
        return row.reward or self.default_reward

    def release_files(self, starts: list[int]) -> None:
        """Close journal files (`starts`: their start positions) that are about to be deleted; images that only their
        records name may then be removed."""
        self.journal.release_files(starts)
        self.images.reclaim_is_due = True

    def reclaim_images(self, named: Callable[[], Iterable[str]], now: float) -> None:
        """Remove the files of images that are not needed, if that is due (`ImageStore.reclaim_is_due`). `named`:
        function that returns the names that the broker may still be asked for."""

        def needed() -> Iterator[str]:
            return chain(named(), self.prompts.upcoming_images())

        self.images.reclaim(needed, self.journal.end, self.journal.synced, now)

    def is_group_scored(self, evaluation: bool, epoch: int, row: int) -> bool:
        """Whether the verifier of the prompt at (epoch, row) scores all responses of a group in one call."""
        return self.reward_of(self.row_of(evaluation, epoch, row)).startswith(GROUP_REWARD)


def split_columns(columns: list[dict[str, int]], values: memoryview) -> list[dict[str, memoryview]]:
    """For each response, the values of its token scores, float32, by name of the score. `columns`: for each response,
    the number of values of each score, in the order in which they are in `values`."""
    found, start = [], 0
    for counts in columns:
        ends = list(accumulate(counts.values(), initial=start))
        pairs = zip(counts, pairwise(ends), strict=True)
        found.append({name: values[4 * first : 4 * end] for name, (first, end) in pairs})
        start = ends[-1]
    return found


def pack(dtype: str, pieces: list[memoryview]) -> wire.PackedArray:
    """Concatenate pieces into one array of `dtype` with its checksum."""
    data = b"".join(pieces)
    return wire.PackedArray(dtype, crc32(data), data)
