"""The images of a dataset row: found in its record in the formats in which datasets are published, and put into its
messages as parts that refer to each image by a hash of its content.

A record has them in a column (`data.images_key`), with an `<image>` marker in the prompt for each, or in the parts of
its messages. Each is a path, the bytes of a file, an object with bytes or path as the `datasets` library writes it, a
data: URL or, from a program, an image of Pillow.
"""

import base64
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from april.config.data import Mapping
from april.data.images import PROMPT_IMAGES, SOURCE_BYTES, file_of
from april.data.rows import MISSING, BadRow, DatasetRow, RowImage, excerpt, value_at

MARKER = "<image>"
"""Text in a prompt that stands for the next image of the record's image column (`data.images_key`)."""
IMAGE_TYPES = ("image", "input_image", "image_url")
"""Types of message parts that are images."""
OWN_KEYS = ("image", "image_url", "url", "path", "bytes")
"""Keys of a message part that may hold the image itself."""
DATA_URL = "data:"


def find_images(record: Any, mapping: Mapping) -> list[Any]:
    """The images in a record's image column, in the dataset's own format and without empty cells; [] without such a
    column. `mapping.images`: candidate names of the column, of which the first in the record is used."""
    if not isinstance(record, dict):
        return []
    for key in mapping.images:
        if (value := value_at(record, key)) is not MISSING and value is not None:
            found = list(value) if isinstance(value, list | tuple) else [value]
            return [image for image in found if image not in (None, "", b"")]
    return []


def with_images(
    row: DatasetRow, column: list[Any], prompt_as: str, folder: Path, store: Callable[[bytes], RowImage]
) -> DatasetRow:
    """The row with its images, and with a message part for each of them. Without images the row is returned unchanged.

    `column`: the images of the record's image column; `folder`: image paths are relative to it; `store`: stores the
    bytes of an image that is not a file. `prompt_as`: value of `data.prompt_as`; with "text", which would lose images,
    a row that has some is refused. Raises BadRow.
    """
    if isinstance(row.prompt, str) and not column:
        return row
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    if not column and not any(map(_is_image, _parts(messages))):
        return row
    if prompt_as == "text":
        raise BadRow("the prompt has images, which data.prompt_as = 'text' would lose; leave it out")
    placed = _Placement(column, folder, store)
    messages = [message | {"content": placed.content(message["content"])} for message in messages]
    if column and not placed.taken:
        messages = _before_the_first_question(messages, [placed.next_of_column() for _ in column])
    if placed.taken != len(column):
        raise BadRow(
            f"the prompt has {placed.taken} {MARKER} markers or image parts for {len(column)} images; "
            "they must be as many, or no marker at all"
        )
    if (count := sum(map(_is_image, _parts(messages)))) > PROMPT_IMAGES:
        raise BadRow(f"the prompt has {count} images, more than {PROMPT_IMAGES}")
    shown = (part["image"] for part in _parts(messages) if _is_image(part))
    return replace(row, prompt=messages, images=tuple(placed.images[source] for source in shown))


@dataclass
class _Placement:
    """Puts the images of one row into its messages, in order."""

    column: list[Any]
    folder: Path
    store: Callable[[bytes], RowImage]

    def __post_init__(self) -> None:
        self.images: dict[str, RowImage] = {}
        """Images by the sha256 of their source."""
        self.taken = 0
        """Number of markers and parts so far that stand for an image of the column."""

    def content(self, content: Any) -> Any:
        """The content of a message with a canonical part for each image; a text without images stays a text."""
        if isinstance(content, list):
            return [done for part in content for done in self._part(part)]
        if isinstance(content, str) and self.column and MARKER in content:
            return list(self._split(content))
        return content

    def _part(self, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not _is_image(part):
            text = str(part.get("text") or "")
            yield from self._split(text) if self.column and MARKER in text else (part,)
            return
        own = next((part[key] for key in OWN_KEYS if part.get(key) is not None), None)
        yield self.next_of_column() if own is None else self._add(own)

    def _split(self, text: str) -> Iterator[dict[str, Any]]:
        for number, piece in enumerate(text.split(MARKER)):
            if number:
                yield self.next_of_column()
            if piece:
                yield {"type": "text", "text": piece}

    def next_of_column(self) -> dict[str, Any]:
        self.taken += 1
        return self._add(self.column[self.taken - 1]) if self.taken <= len(self.column) else {}

    def _add(self, given: Any) -> dict[str, Any]:
        image = image_at(given, self.folder, self.store)
        self.images[image.source] = image
        return {"type": "image", "image": image.source}


def image_at(given: Any, folder: Path, store: Callable[[bytes], RowImage]) -> RowImage:
    """Convert an image as datasets give it (path, bytes, object, data: URL or Pillow image) to a `RowImage`. `folder`:
    relative paths start there; `store`: stores bytes that are no file. Raises BadRow."""
    if isinstance(given, dict):
        given = next((given[key] for key in ("bytes", "path", "url") if given.get(key) is not None), None)
    if isinstance(given, bytes):
        return store(given)
    if not isinstance(given, str) and (file := file_of(given)):
        return store(file)
    if not isinstance(given, str) or not given:
        raise BadRow(f"an image is given as {excerpt(given)}; give a path, the bytes of its file, or a data: URL")
    if given.startswith(DATA_URL):
        return store(data_url_bytes(given))
    if "://" in given and not given.startswith("file://"):
        raise BadRow(f"an image is at {excerpt(given)}, and April fetches nothing; save it, and give its path")
    path = folder / given.removeprefix("file://")
    return RowImage(hashlib.sha256(file_bytes(path)).hexdigest(), str(path))


def file_bytes(path: Path) -> bytes:
    """The bytes of a picture's file. Raises BadRow."""
    try:
        if (size := path.stat().st_size) > SOURCE_BYTES:
            raise BadRow(f"image {str(path)!r} has {size:,} bytes, more than {SOURCE_BYTES:,}; save it smaller")
        return path.read_bytes()
    except OSError as error:
        raise BadRow(
            f"image {str(path)!r} cannot be read ({error.strerror}); paths begin at the dataset's file, and those of "
            "submitted prompts at the trainer's working folder"
        ) from None


def data_url_bytes(url: str) -> bytes:
    """The bytes in a data: URL of an image. Raises BadRow."""
    head, separator, encoded = url.partition(",")
    if not separator or not head.endswith(";base64"):
        raise BadRow(f"an image is given as {excerpt(url)}, and a data: URL is like data:image/png;base64,…")
    return base64_bytes(encoded)


def base64_bytes(encoded: str) -> bytes:
    """The bytes of an image in base64. Raises BadRow."""
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:  # binascii.Error, or characters beyond ASCII
        raise BadRow(f"an image is not base64 ({error})") from None


def _parts(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        if isinstance(message["content"], list):
            yield from message["content"]


def _is_image(part: dict[str, Any]) -> bool:
    return part["type"] in IMAGE_TYPES


def _before_the_first_question(messages: list[dict[str, Any]], parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Insert the images (`parts`) before the text of the user's first message, for messages without an image marker."""
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), 0)
    content = messages[first]["content"]
    texts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    changed = messages[first] | {"content": [*parts, *texts]}
    return [*messages[:first], changed, *messages[first + 1 :]]
