"""The images of submitted prompts: found as those of dataset rows are, and prepared for the policy."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

from april.broker.image_preparation import THREADS
from april.config import Config
from april.data.images import ImageRule, PreparedImage, prepare
from april.data.row_images import file_bytes, image_at, with_images
from april.data.rows import DatasetRow, RowImage
from april.data.tokenizer import Tokenizer
from april.util.errors import refuse
from april.workers.engines import ENGINES

WORKING_FOLDER = Path()
"""Folder from which relative paths of images are resolved."""


class PromptImages:
    """Images of the prompts that are encoded together, each prepared once.

    images = PromptImages(config, lambda: tokenizer)
    messages, sources = images.place(messages, [])      # its images become canonical parts
    images.prepare()                                    # all that were placed
    images.prepared[sources[0]].tokens
    """

    def __init__(self, config: Config, tokenizer: Callable[[], Tokenizer]):
        """`tokenizer`: function that loads the policy's tokeniser, called once there is an image."""
        self._config, self._tokenizer = config, tokenizer
        self._files: dict[str, bytes] = {}
        """Bytes of the images that are no files, by their sha256."""
        self._placed: dict[str, RowImage] = {}
        self.prepared: dict[str, PreparedImage] = {}
        """Prepared images by the sha256 of their source."""

    def place(self, prompt: str | list[dict[str, Any]], column: Sequence[Any]) -> tuple[str | list[dict], list[str]]:
        """The prompt with a canonical part for each image, and the images' sources in order. `column`: images that have
        no part of their own in the prompt. Raises BadRow."""
        row = with_images(DatasetRow(prompt, ""), list(column), "given", WORKING_FOLDER, self._keep)
        return row.prompt, self._note(row.images)

    def sources(self, column: Sequence[Any]) -> list[str]:
        """Sources of the images of a prompt of token ids, in order. Raises BadRow."""
        return self._note(image_at(image, WORKING_FOLDER, self._keep) for image in column)

    def prepare(self) -> None:
        """Prepare all images that were placed. Raises BadRow, and ConfigError where the run takes no images."""
        if not self._placed:
            return
        rule = self._rule()
        with ThreadPoolExecutor(THREADS, "images") as threads:
            prepared = threads.map(lambda image: prepare(self._source(image), rule), self._placed.values())
            self.prepared = dict(zip(self._placed, prepared, strict=True))

    def _keep(self, file: bytes) -> RowImage:
        source = sha256(file).hexdigest()
        self._files[source] = file
        return RowImage(source)

    def _note(self, images: Iterable[RowImage]) -> list[str]:
        images = list(images)
        self._placed |= {image.source: image for image in images}
        return [image.source for image in images]

    def _source(self, image: RowImage) -> bytes:
        return file_bytes(Path(image.path)) if image.path else self._files[image.source]

    def _rule(self) -> ImageRule:
        engine, rule = self._config.worker.engine, self._tokenizer().image_rule
        if not ENGINES.find(engine).takes_images:
            able = ", ".join(repr(name) for name in ENGINES.shipped if ENGINES.find(name).takes_images)
            refuse("worker.engine", engine, "takes no images, and submitted prompts have some", f"use one of {able}")
        if rule is None:
            why = "takes no images, and submitted prompts have some"
            refuse("model.path", self._config.model.path, why, "use a model with an image processor")
        return rule
