"""Images for the comparison of a model with transformers': runs of placeholders in its test sequences, each an image of
noise."""

from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from april.data.pixels import PixelReader, png_of
from april.learner.vision import ImagePacker, tower

RUNS = {72: ((8, 7), (30, 6)), 12: ((3, 2),)}
"""(start, length) of the runs of placeholders in a sequence, by its length; one is wider than a window of a tower."""


def place_images(lm: nn.Module, sequences: list[Tensor]) -> None:
    """Put placeholders into sequences of token ids, in place, if the model takes images."""
    if tower(lm) is None:
        return
    for sequence in sequences:
        sequence[sequence == lm.config.image_token_id] = 0
        for start, length in RUNS.get(len(sequence), ()):
            sequence[start : start + length] = lm.config.image_token_id


def packer_of(lm: nn.Module) -> ImagePacker | None:
    """The packer of images for the model `lm`; None if the model takes no images. In place of an image processor's
    settings it normalises with mean and standard deviation 0.5."""
    return ImagePacker(lm, reader_of(lm.config)) if tower(lm) else None


def reader_of(config: PreTrainedConfig) -> PixelReader:
    vision = config.vision_config
    half = (0.5, 0.5, 0.5)
    return PixelReader(vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size, half, half)


def images_of(lm: nn.Module, sequence: Tensor) -> tuple[bytes, ...]:
    """The image, a PNG, of each run of placeholders in the token ids `sequence`: two tokens high if the run has an even
    number of placeholders, otherwise one token high."""
    if tower(lm) is None:
        return ()
    runs = [len(list(run)) for is_image, run in groupby((sequence == lm.config.image_token_id).tolist()) if is_image]
    reader = reader_of(lm.config)
    return tuple(noise(reader.patch * reader.merge, 2 - length % 2, length) for length in runs)


def noise(side: int, rows: int, tokens: int) -> bytes:
    """A PNG of noise for `tokens` tokens in `rows` rows; a token is a square with sides of `side` pixels."""
    shape = rows * side, tokens // rows * side, 3
    return png_of(np.random.default_rng(tokens).integers(256, size=shape, dtype=np.uint8))


def inputs_of(lm: nn.Module, sequence: Tensor) -> dict[str, Any]:
    """Keyword arguments with which transformers' model gets the images of `sequence`, token ids [T], when it is called
    with all of these ids but the last; {} if the model takes no images."""
    images = images_of(lm, sequence)
    if not images:
        return {}
    read = [reader_of(lm.config).read(png) for png in images]
    return {
        "pixel_values": torch.from_numpy(np.concatenate([rows for rows, _ in read])),
        "image_grid_thw": torch.tensor([grid for _, grid in read]),
        "mm_token_type_ids": (sequence[None, :-1] == lm.config.image_token_id).int(),
    }
