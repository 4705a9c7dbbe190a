"""Images in requests to SGLang.

SGLang takes one placeholder for each image, and repeats it as often as the image has tokens. If that fails, it may
tokenise the text again and only log it, so the token ids that it reports are compared with those that were meant.
SGLang may take tokens that a policy has sampled for images or videos (`ImageTokens`). A request with such tokens and an
image is refused. They are not masked in sampling either, since log-probabilities would then be those of another
distribution.
"""

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from april.data.images import PNG_HEAD_BYTES, ImageRule, png_size, read_json
from april.data.pixels import places_of_images
from april.workers.engines.base import EngineError, Request

LOOKS_BEHIND_START = ("qwen2_vl", "qwen2_5_vl")
"""Model types for which SGLang 0.5.23 (`get_rope_index`) reads the token after each token that begins an image or a
video. If such a token is the last one, SGLang breaks off its answer, and only its log says why (IndexError)."""


@dataclass(frozen=True)
class ImageTokens:
    """A model's placeholders of images, and the token ids that SGLang does not read as text beside images."""

    rule: ImageRule
    video: int | None = None
    """Id of the placeholder of a video, None if there is none. SGLang refuses a request that has it and no video."""
    start: int | None = None
    """Id of the token that begins an image, if SGLang fails on a request that ends with it; None if it does not."""

    @classmethod
    def of(cls, folder: Path) -> "ImageTokens | None":
        """The ids, and the rule for the number of an image's tokens, of the model in a folder; None for a model that
        takes no images. Raises ConfigError."""
        rule, config = ImageRule.of(folder), read_json(folder / "config.json")
        if rule is None:
            return None
        start = config.get("vision_start_token_id") if config.get("model_type") in LOOKS_BEHIND_START else None
        return cls(rule, config.get("video_token_id"), start)

    def check_text(self, tokens: np.ndarray, is_text: np.ndarray) -> None:
        """Raise ValueError for tokens, int32 [T], that SGLang would misread beside images, such as sampled
        placeholders. `is_text`, bool [T]: False at the placeholders of the request's images."""
        if sampled := np.count_nonzero((tokens == self.rule.token_id) & is_text):
            raise ValueError(f"{sampled} placeholders were sampled, and SGLang takes each for an image")
        if self.video in tokens:
            raise ValueError("a placeholder of a video was sampled, and SGLang looks for the video")
        if tokens[-1] == self.start:
            raise ValueError("its last token begins an image, and SGLang reads the token behind it")


@dataclass(frozen=True)
class SentImages:
    """The images of one request, in the form in which SGLang takes them."""

    known: ImageTokens
    counts: Sequence[int]
    """Number of tokens of each image."""
    starts: Sequence[int]
    """For each image, the index of the first token of the request that may be its placeholder; empty: 0 for all."""
    urls: Sequence[str]
    """The PNG files as data: URLs."""

    @classmethod
    def of(cls, request: Request, known: ImageTokens | None) -> "SentImages":
        """The images of a request for a server. `known`: how the model takes images; None for a model that takes none.
        Raises EngineError for images that do not fit the request or the model."""
        if known is None:
            raise EngineError(f"request {request.id} has images, and the model takes none")
        try:
            counts = [known.rule.tokens(*png_size(png[:PNG_HEAD_BYTES])) for png in request.images]
        except struct.error:
            raise EngineError(f"request {request.id} has an image that is no PNG file") from None
        urls = ["data:image/png;base64," + base64.b64encode(png).decode() for png in request.images]
        sent = cls(known, counts, request.image_starts, urls)
        try:
            sent.collapsed(request.tokens)
        except ValueError as error:
            raise EngineError(f"request {request.id} cannot be shown its images: {error}") from None
        return sent

    def fields(self, context: Sequence[int]) -> dict[str, Any]:
        """Fields for the body of POST /generate: the images, and the token ids `context` with one placeholder for each
        image. In `context` each image has all its placeholders. Raises ValueError if images and tokens do not fit."""
        ids = self.collapsed(np.array(context)).tolist()
        return {"input_ids": ids, "image_data": self.urls, "return_prompt_token_ids": True}

    def collapsed(self, tokens: np.ndarray) -> np.ndarray:
        """The token ids `tokens`, int32 [T], with a single placeholder for each image instead of all its placeholders.
        Raises ValueError for too few placeholders, and for tokens that SGLang would not read as meant."""
        places = places_of_images(tokens, self.known.rule.token_id, self.counts, self.starts)
        self.known.check_text(tokens, ~places)
        is_kept, of_images = ~places, np.flatnonzero(places)
        is_kept[of_images[np.cumsum([0, *self.counts[:-1]])]] = True
        return tokens[is_kept]
