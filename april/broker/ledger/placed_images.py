"""Images that agents have sent, by their place among the tokens of a sample."""

from collections.abc import Iterable

PlacedImage = tuple[str, int]
"""(name of an image, offset in the response of the first token that may be a placeholder of it)."""


def images_before(images: Iterable[PlacedImage], length: int) -> tuple[PlacedImage, ...]:
    """The images in the first `length` tokens of a response, which end a turn."""
    return tuple(image for image in images if image[1] < length)
