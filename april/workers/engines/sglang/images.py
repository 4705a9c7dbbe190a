"""Images in requests to SGLang.

SGLang takes one placeholder for each image, and repeats it as often as the image has tokens. Where that fails, it may
tokenise the text again and only log it, so the prompt that it has read is compared with the one that was meant.
"""

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from april.data.images import PNG_HEAD_BYTES, ImageRule, png_size
from april.data.pixels import places_of_images
from april.workers.engines.base import EngineError, Request


@dataclass(frozen=True)
class SentImages:
    """The images of one request, in the form in which SGLang takes them."""

    token_id: int
    """Id of the placeholder."""
    counts: Sequence[int]
    """Number of tokens of each image."""
    starts: Sequence[int]
    """As `Request.image_starts`."""
    urls: Sequence[str]
    """The PNG files as data: URLs."""

    @classmethod
    def of(cls, request: Request, rule: ImageRule | None) -> "SentImages":
        """The images of a request to a model with this rule. Raises EngineError for images that do not fit the request
        or the model."""
        if rule is None:
            raise EngineError(f"request {request.id} has images, and the model takes none")
        try:
            counts = [rule.tokens(*png_size(png[:PNG_HEAD_BYTES])) for png in request.images]
        except struct.error:
            raise EngineError(f"request {request.id} has an image that is no PNG file") from None
        urls = ["data:image/png;base64," + base64.b64encode(png).decode() for png in request.images]
        sent = cls(rule.token_id, counts, request.image_starts, urls)
        try:
            sent.collapsed(request.tokens)
        except ValueError as error:
            raise EngineError(f"request {request.id} cannot be shown its images: {error}") from None
        return sent

    def fields(self, context: Sequence[int]) -> dict[str, Any]:
        """Fields of the body of POST /generate for token ids that contain the images. Raises ValueError."""
        ids = self.collapsed(np.array(context)).tolist()
        return {"input_ids": ids, "image_data": self.urls, "return_prompt_token_ids": True}

    def collapsed(self, tokens: np.ndarray) -> np.ndarray:
        """Token ids with one placeholder in the place of those of each image. Raises ValueError for too few of them,
        and for one that was sampled, which SGLang would take for an image."""
        places = places_of_images(tokens, self.token_id, self.counts, self.starts)
        if sampled := np.count_nonzero((tokens == self.token_id) & ~places):
            raise ValueError(f"{sampled} placeholders were sampled, and SGLang takes each for an image")
        is_kept, of_images = ~places, np.flatnonzero(places)
        is_kept[of_images[np.cumsum([0, *self.counts[:-1]])]] = True
        return tokens[is_kept]
