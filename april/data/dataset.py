"""A run's dataset: the rows of all its sources, read once and then available by index.

Rows of every format are written in a compact form into an unnamed temporary file (held in memory while it is small);
memory keeps eight bytes a row. The order of draws and the fingerprint, by which a journal recognises its dataset,
therefore depend only on the rows.
"""

import hashlib
import logging
import tempfile
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from os import SEEK_END
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from april.config import ConfigError, DataSection, SourceSection
from april.config.data import MAPPINGS, OWN_MAPPING, Mapping, is_own_mapping
from april.data.records import data_files, read_records
from april.data.row_images import file_bytes, find_images, with_images
from april.data.rows import BadRow, DatasetRow, RowImage, make_row, mapped

log = logging.getLogger(__name__)

# --- order of the rows ------------------------------------------------------------------------------------------------


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The row indices in the order of this epoch, int64 [count]: random by `seed` and `epoch`, or ascending without
    `shuffle`."""
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch)))
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)


def mixed_order(counts: list[int], weights: list[float], seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [rows of the epoch]: row indices in the order of this epoch, into the concatenation of all sources.

    `counts` and `weights`: number of rows and weight of each source; `shuffle`: random order by `seed`, otherwise
    ascending. A source of n rows with weight w contributes max(1, round(w * n)) rows. Its rows are drawn in passes,
    each pass with its own order, and an epoch continues where the previous one stopped. So every row of a source is
    drawn equally often, for any weight.
    """
    parts, offset = [], 0
    for source, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        parts.append(offset + source_rows(count, rows_per_epoch(count, weight), (seed, source), epoch, shuffle))
        offset += count
    rows = np.concatenate(parts)
    return rows[epoch_order(len(rows), seed, epoch, shuffle)]


def rows_per_epoch(count: int, weight: float) -> int:
    """Number of rows that a source of `count` rows contributes to an epoch. `weight`: how often an epoch has each row
    of the source, on average."""
    return max(1, round(weight * count))


def source_rows(count: int, wanted: int, seed: tuple[int, int], epoch: int, shuffle: bool) -> np.ndarray:
    """int64 [wanted]: row indices of one source in this epoch, which continues the previous epoch's pass over the
    source. `count`: rows of the source; `wanted`: those of an epoch; `seed`: (the run's seed, number of the source);
    `shuffle`: whether each pass has a random order, otherwise it is ascending."""
    if wanted == count:
        return np.arange(count, dtype=np.int64)
    start, end = epoch * wanted, (epoch + 1) * wanted
    passes = range(start // count, (end - 1) // count + 1)
    rows = np.concatenate([pass_order(count, seed, number, shuffle) for number in passes])
    return rows[start - passes[0] * count : end - passes[0] * count]


def pass_order(count: int, seed: tuple[int, int], number: int, shuffle: bool) -> np.ndarray:
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    bits = np.random.PCG64(np.random.SeedSequence((*seed, number)))
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)


# --- dataset ----------------------------------------------------------------------------------------------------------

HELD_BYTES = 64 << 20
"""Size of the encoded rows (bytes) beyond which they are moved from memory to disk."""
BAD_ROWS_LOGGED = 20
"""Number of bad rows logged with their location; the others are only counted."""

encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(DatasetRow)


class Dataset:
    """All rows of a run's sources, by index, and the order of the indices in each epoch.

    dataset = load_dataset(config.data.train_sources, config.data)
    for index in dataset.order(seed=0, epoch=3):
        dataset[index].prompt
    """

    def __init__(self, shuffle: bool = False):
        self.shuffle = shuffle
        self.counts: list[int] = []
        """Number of rows of each source."""
        self.weights: list[float] = []
        self.rewards: set[str] = set()
        """Names of the verifiers that rows ask for."""
        self.bad_rows = 0
        """Number of records that were skipped."""
        self.blank_labels = 0
        """Number of rows with an empty label."""
        self.with_images = 0
        """Number of rows that have images."""
        self._file = tempfile.SpooledTemporaryFile(max_size=HELD_BYTES)  # noqa: SIM115
        self._images = tempfile.SpooledTemporaryFile(max_size=HELD_BYTES)  # noqa: SIM115
        """Unnamed file with the bytes of images that the dataset contains, instead of naming an image file."""
        self._reading_images = threading.Lock()
        self._ends = array("Q")
        self._digest = hashlib.sha256(b"shuffled" if shuffle else b"in order")
        self.order = lru_cache(maxsize=2)(self._order)

    def source_of(self, index: int) -> int:
        """Number, from 0, of the source that the row with this index is from."""
        return bisect_right(list(accumulate(self.counts)), index)

    def add_source(self, rows: Iterable[DatasetRow], weight: float = 1.0) -> None:
        before = len(self)
        for row in rows:
            record = encoder.encode(row)
            self.with_images += bool(row.images)
            self._file.write(record)
            self._ends.append(self._end + len(record))
            more = [*row.tools, *([row.hint] if row.hint else [])]
            self._digest.update(encoder.encode((row.prompt, row.label, row.reward, *more)))  # images by content
            self.blank_labels += not row.label.strip()
            if row.reward:
                self.rewards.add(row.reward)
        self.counts.append(len(self) - before)
        self.weights.append(weight)
        self._digest.update(f"source of weight {weight:.17g}".encode())

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> DatasetRow:
        start = self._ends[index - 1] if index else 0
        self._file.seek(start)
        return decoder.decode(self._file.read(self._ends[index] - start))

    def keep_image(self, source: bytes) -> RowImage:
        """Store the bytes of an image that is not a file; returns its `RowImage`, with which `image_source` reads them
        back."""
        start = self._images.seek(0, SEEK_END)
        self._images.write(source)
        return RowImage(hashlib.sha256(source).hexdigest(), "", start, len(source))

    def image_source(self, image: RowImage) -> bytes:
        """The bytes of a row's image, as they are in the dataset; may be called from any thread. Raises BadRow for a
        file that has changed."""
        if not image.path:
            with self._reading_images:
                self._images.seek(image.start)
                return self._images.read(image.size)
        source = file_bytes(Path(image.path))
        if hashlib.sha256(source).hexdigest() != image.source:
            raise BadRow(f"image {image.path!r} has changed since the dataset was read; restore it, or begin a new run")
        return source

    @property
    def _end(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def fingerprint(self) -> str:
        """sha256 in hex of the rows and their order; with the seed it determines which row a
        position in an epoch refers to."""
        return self._digest.hexdigest()

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        return mixed_order(self.counts, self.weights, seed, epoch, self.shuffle)


def load_dataset(
    sources: list[SourceSection], data: DataSection, limit: int | None = None, allowed: Collection[str] = ()
) -> Dataset:
    """Read all sources, or the first `limit` rows of each. `allowed`: verifiers that rows may name; empty: the shipped
    ones. Raises ConfigError for an unreadable or empty source, or a bad row if `data.bad_rows` is "stop"."""
    dataset = Dataset(data.shuffle)
    for source in sources:
        mapping = mapping_of(source)
        make = partial(row_of, mapping=mapping, source=source, data=data, dataset=dataset, allowed=allowed)
        add_rows(dataset, source, data, limit, mapping.columns, make)
    if dataset.blank_labels:
        log.warning(
            "%d of %d rows have a blank label; most verifiers refuse it when they score",
            dataset.blank_labels,
            len(dataset),
        )
    return dataset


def add_rows(
    dataset: Dataset,
    source: SourceSection,
    data: DataSection,
    limit: int | None,
    columns: set[str],
    make: Callable[[Any], DatasetRow],
) -> None:
    """Add the rows of a source, or the first `limit` of them, to a dataset. Raises ConfigError as `load_dataset` does.

    `columns`: top-level fields that are read from the source's records, all if empty; `make`: converts a record to a
    row, or raises BadRow.
    """
    before, bad = len(dataset), dataset.bad_rows
    dataset.add_source(read_source_rows(dataset, source, data, limit, columns, make), source.weight)
    if len(dataset) == before:
        mend = "write one JSON object for each row"
        if dataset.bad_rows > bad:
            mend = f"mend them, or the keys that name their parts; {dataset.bad_rows - bad} were skipped"
        raise ConfigError(f"dataset {source.path} has no rows; {mend}")
    if dataset.bad_rows > bad:
        log.warning("%d bad rows skipped, %d rows left", dataset.bad_rows - bad, len(dataset) - before)


def read_source_rows(
    dataset: Dataset,
    source: SourceSection,
    data: DataSection,
    limit: int | None,
    columns: set[str],
    make: Callable[[Any], DatasetRow],
) -> Iterable[DatasetRow]:
    made = 0
    for where, record in read_records(data_files(source), columns):
        if made == limit:
            return
        try:
            row = make(record)
        except BadRow as error:
            if data.bad_rows == "stop":
                raise ConfigError(f"{where}: {error}") from None
            dataset.bad_rows += 1
            if dataset.bad_rows <= BAD_ROWS_LOGGED:
                log.warning("bad row skipped: %s: %s", where, error)
            continue
        made += 1
        yield row


def row_of(
    record: Any,
    mapping: Mapping,
    source: SourceSection,
    data: DataSection,
    dataset: Dataset,
    allowed: Collection[str],
) -> DatasetRow:
    row = make_row(given_record(record, source), mapping, source.reward, data.prompt_as, allowed)
    return with_images(row, find_images(record, mapping), data.prompt_as, folder_of(source), dataset.keep_image)


def given_record(record: Any, source: SourceSection) -> Any:
    """A record as it was read or, if the source names the user's own mapping, as that converts it. Raises BadRow."""
    if isinstance(record, BadRow):
        raise record
    return mapped(record, source.mapping) if source.mapping and is_own_mapping(source.mapping) else record


def folder_of(source: SourceSection) -> Path:
    """The folder to which the image paths in a source's records are relative."""
    return source.path if source.path.is_dir() else source.path.parent


def verifier_of(source: SourceSection) -> str | None:
    """Verifier for the source's rows that name none, set by the source or its mapping; None: the run's default."""
    return source.reward or base_mapping(source).reward


def base_mapping(source: SourceSection) -> Mapping:
    """The shipped mapping that a source names; for a user's own mapping, `OWN_MAPPING`, which reads the rows that it
    returns."""
    return OWN_MAPPING if is_own_mapping(source.mapping) else MAPPINGS[source.mapping or "plain"]


def mapping_of(source: SourceSection) -> Mapping:
    """The source's mapping, with its prompt and label keys replaced by those of the source."""
    mapping = base_mapping(source)
    return replace(
        mapping,
        prompt=(source.prompt_key,) if source.prompt_key else mapping.prompt,
        label=(source.label_key,) if source.label_key else mapping.label,
        images=mapping.images if source.images_key is None else tuple(filter(None, (source.images_key,))),
        hint=source.hint_key,
    )
