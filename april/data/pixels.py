"""Input of a vision-language model for a prepared image: rows of pixels, one for each patch.

reader = PixelReader.of(folder)
rows, grid = reader.read(png)          # float32 [patches, D], (1, height, width) in patches
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from april.data.images import pillow, processor_config

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of red, green and blue (values from 0 to 1) for a policy folder that gives none, as in
transformers."""


@dataclass(frozen=True)
class PixelReader:
    """Makes rows of pixels of an image that needs no resizing, as a model's image processor does."""

    patch: int
    """Side of a patch (pixels)."""
    merge: int
    """Patches along a side of the square that becomes one token; rows are ordered square by square."""
    frames: int = 2
    """Number of frames for which an image is repeated, as the model expects videos (temporal patch size)."""
    mean: Sequence[float] = CLIP_MEAN
    std: Sequence[float] = CLIP_STD
    factor: float | None = 1 / 255
    """Factor by which values from 0 to 255 are multiplied before normalisation; None leaves them as they are."""

    @classmethod
    def of(cls, folder: Path) -> "PixelReader | None":
        """The reader for the images of a policy, given by its folder; None if the folder has no settings of an image
        processor."""
        settings = processor_config(folder)
        if not settings:
            return None
        normalises = settings.get("do_normalize", True)
        return cls(
            settings.get("patch_size", 14),
            settings.get("merge_size", 2),
            settings.get("temporal_patch_size", 2),
            settings.get("image_mean", CLIP_MEAN) if normalises else (0.0, 0.0, 0.0),
            settings.get("image_std", CLIP_STD) if normalises else (1.0, 1.0, 1.0),
            settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else None,
        )

    def read(self, png: bytes) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Rows of a prepared image, float32 [patches, 3 * frames * patch²], and its grid (1, height, width) in patches.
        Equal to what transformers' Qwen2VLImageProcessorPil gives with do_resize=False."""
        values = np.asarray(pillow().open(io.BytesIO(png)).convert("RGB")).transpose(2, 0, 1)
        image = np.stack([table[channel] for table, channel in zip(self.tables(), values, strict=True)])
        height, width = (side // self.patch for side in image.shape[1:])
        squares = image.reshape(
            3, height // self.merge, self.merge, self.patch, width // self.merge, self.merge, self.patch
        ).transpose(1, 4, 2, 5, 0, 3, 6)
        films = np.repeat(squares[:, :, :, :, :, None], self.frames, axis=5)
        return films.reshape(height * width, -1), (1, height, width)

    def tables(self) -> list[np.ndarray]:
        """The normalised value of each 8-bit value of red, green and blue, float32 [256] each."""
        values = np.arange(256, dtype=np.float64)
        values = (values if self.factor is None else values * self.factor).astype(np.float32)
        return [(values - np.float32(mean)) / np.float32(std) for mean, std in zip(self.mean, self.std, strict=True)]

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Number of tokens of an image with this grid: (1, height, width) in patches."""
        return grid[1] * grid[2] // self.merge**2


def png_of(values: np.ndarray) -> bytes:
    """A lossless PNG file of values of red, green and blue, uint8 [height, width, 3]."""
    file = io.BytesIO()
    pillow().fromarray(values).save(file, "PNG")
    return file.getvalue()


def places_of_images(
    tokens: np.ndarray, token_id: int, counts: Sequence[int], starts: Sequence[int] = ()
) -> np.ndarray:
    """Whether each token stands for an image, bool [T]. Any other placeholder token was sampled by the policy, and is
    text.

    `counts`: number of tokens of each image, in order. `starts`: index of the token from which each image's
    placeholders are looked for; empty: 0 for all. An image takes the first placeholders from there on that earlier
    images have not taken. Raises ValueError if there are too few.
    """
    placeholders = np.flatnonzero(np.asarray(tokens) == token_id)
    places, taken = np.zeros(len(tokens), bool), 0
    for count, start in zip(counts, starts or [0] * len(counts), strict=True):
        taken = max(taken, int(np.searchsorted(placeholders, start))) + count
        places[placeholders[taken - count : taken]] = True
    if taken > len(placeholders):
        wanted = sum(counts)
        raise ValueError(f"the images take {wanted} tokens, and the text has {len(placeholders)} of their placeholders")
    return places


PLACES = "image_places"
"""Name of the forward argument that tells a model's body which tokens stand for images, bool [B, T]."""


def take_image_places(body: Any) -> None:
    """Patch the body of a transformers model so that its forward accepts `PLACES`, the tokens that stand for images.
    Without that it treats every placeholder token as an image, also those that a policy has sampled."""
    given, theirs = list[Any](), body.get_placeholder_mask

    def take(module: Any, arguments: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given[:] = [options.pop(PLACES, None)]
        return arguments, options

    def mask(*arguments: Any, **options: Any) -> tuple[Any, Any]:
        (places,) = given
        if places is None:
            found: tuple[Any, Any] = theirs(*arguments, **options)
            return found
        return places[..., None], (places & ~places)[..., None]

    body.register_forward_pre_hook(take, with_kwargs=True)
    body.get_placeholder_mask = mask
