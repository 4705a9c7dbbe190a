"""The messages that upload an image to the broker: its file in parts, each small enough for a frame."""

from collections.abc import Iterator

import numpy as np

from april.wire.sessions import KeepImage

PART_BYTES = 2 << 20
"""Most bytes of an image in one message."""


def image_parts(name: str, png: bytes) -> Iterator[tuple[KeepImage, list[np.ndarray]]]:
    """The messages, with their arrays, that upload the file `png` of an image; the broker answers the last one."""
    for start in range(0, len(png), PART_BYTES):
        yield KeepImage(name, start, len(png)), [np.frombuffer(png[start : start + PART_BYTES], np.uint8)]
