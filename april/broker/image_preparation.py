"""The preparation of a run's images in threads, ahead of the prompts that show them.

Decoding and resizing a large photograph takes a tenth of a second and more, in which the broker's loop would answer no
peer. The threads also put the files on disk, so that a group can be opened at once.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from april.broker.images import ImageStore
from april.data.dataset import Dataset
from april.data.images import ImageRule, prepare
from april.data.rows import BadRow, RowImage

THREADS = min(4, os.cpu_count() or 1)
PROMPTS_AHEAD = 64
"""Number of prompts after the prompt cursor whose images are prepared before the prompts are drawn."""


@dataclass(frozen=True)
class KnownImage:
    """A prepared image, whose pixels are on disk."""

    name: str
    """The sha256 of its file in hex."""
    tokens: int
    """Number of tokens of the prompt that the image takes."""


class ImagePreparation:
    """Prepares images, each once, and keeps the files of those that will be drawn soon.

    preparation.begin(rows, row.images)         # returns at once
    preparation.wait_for(rows, image).tokens    # waits for the thread that prepares it
    preparation.names()                         # files that must stay
    """

    def __init__(self, rule: ImageRule, store: ImageStore | None):
        """`rule`: how images are prepared for the policy; `store`: where the files go; without one images are prepared
        and not kept."""
        self._rule, self._store = rule, store
        self._threads = ThreadPoolExecutor(THREADS, "images")
        self._prepared: dict[str, Future[KnownImage]] = {}
        """Future of each image's preparation, under way or done, by the sha256 of the image as it was given."""
        self._upcoming = deque[frozenset[str]](maxlen=2 * PROMPTS_AHEAD)
        """Sources (sha256) of the images of each of the newest prompts given to `begin`, which may not have been drawn
        yet."""
        self._lasting: set[str] = set()
        """Images whose prepared files are never removed, by the sha256 of the image as it was given."""
        self._names: dict[str, str] = {}
        """Sha256 of an image as it was given -> name of its prepared file, for all images prepared so far; entered
        before the file is on disk."""

    def begin(self, rows: Dataset, images: Iterable[RowImage], lasting: bool = False) -> None:
        """Start preparing the images of a prompt, unless their files exist. `lasting`: never remove the files, as for
        held-out prompts, which are used in every evaluation."""
        images = list(images)
        sources = frozenset(image.source for image in images)
        if lasting:
            self._lasting |= sources
        elif sources:
            self._upcoming.append(sources)
        for image in images:
            self._begin(rows, image)

    def wait_for(self, rows: Dataset, image: RowImage) -> KnownImage:
        """The image, once it is prepared and its file is on disk; later calls prepare it again if the file has gone.
        Raises BadRow for an image that the model cannot take, and OSError if the file cannot be written; the next call
        tries again, as the cause may be gone by then."""
        return self._result(image, self._begin(rows, image))

    def tokens_of(self, rows: Dataset, image: RowImage) -> int:
        """Number of tokens that an image takes in its prompt. Waits for the preparation of an image that was not
        prepared before; a prepared image's file may have been removed since. Raises BadRow for an image that the model
        cannot take, and OSError if its file cannot be written."""
        known = self._prepared.get(image.source)
        return (self._result(image, known) if known else self.wait_for(rows, image)).tokens

    def names(self) -> Iterator[str]:
        """Names of the images whose files must stay: those that `begin` was told to keep for good, and those of prompts
        that may be drawn soon."""
        for source in self._lasting.union(*list(self._upcoming)):
            if source in self._names:
                yield self._names[source]

    def close(self) -> None:
        """Start no further preparation, without waiting for the running ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, rows: Dataset, image: RowImage) -> "Future[KnownImage]":
        known = self._prepared.get(image.source)
        if known is None or (known.done() and self._has_lost_its_file(known)):
            known = self._prepared[image.source] = self._threads.submit(self._prepare, rows, image)
        return known

    def _result(self, image: RowImage, known: "Future[KnownImage]") -> KnownImage:
        """The result of the preparation `known` of an image; a failure is raised, and the next call prepares the image
        again."""
        try:
            return known.result()
        except (BadRow, OSError):
            self._prepared.pop(image.source, None)
            raise

    def _has_lost_its_file(self, known: "Future[KnownImage]") -> bool:
        return known.exception() is None and bool(self._store and known.result().name not in self._store)

    def _prepare(self, rows: Dataset, image: RowImage) -> KnownImage:
        try:
            prepared = prepare(rows.image_source(image), self._rule)
        except BadRow as error:
            reason = str(error)
        else:
            reason = ""
        if reason:
            raise BadRow(reason)  # without the frames of the first one, which hold the source
        self._names[image.source] = prepared.name
        if self._store:
            self._store.keep(prepared.name, prepared.png)
        return KnownImage(prepared.name, prepared.tokens)
