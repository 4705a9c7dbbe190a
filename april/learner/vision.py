"""Images in the learner: a vision-language model is passed rows of pixels, end to end as its packed sequences, and
positions in three axes. Its vision tower keeps images apart by itself.

Ranks call the collectives of a sharded tower together: where one has images, a rank without any computes one token of
a blank image, in a sequence that nothing is trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from april.data.pixels import PLACES, PixelReader, places_of_images, png_of, take_image_places
from april.learner.batch import TrainSample


def text_model(lm: nn.Module) -> nn.Module:
    """The part of a model with its decoder layers: the body, or inside that of a vision-language model the language
    model."""
    body = lm.base_model
    return getattr(body, "language_model", body)


def tower(lm: nn.Module) -> nn.Module | None:
    """The vision tower of a model that takes images as Qwen's vision-language models do; None for any other model."""
    body = lm.base_model
    found = getattr(body, "visual", None)
    return found if hasattr(found, "blocks") and hasattr(body, "get_rope_index") else None


def tower_blocks(lm: nn.Module) -> list[nn.Module]:
    """The layers of a model's vision tower."""
    found = tower(lm)
    return list(found.blocks) if found else []


def prepare_tower(lm: nn.Module) -> None:
    """Change a new model that takes images, in place: its vision tower uses torch's own attention, and its body is told
    by the caller which tokens are placeholders of images, instead of finding them."""
    if found := tower(lm):
        found.set_attn_implementation("sdpa")
        take_image_places(lm.base_model)


def freeze_tower(lm: nn.Module) -> None:
    """Leave a model's vision tower, if there is one, out of training."""
    if found := tower(lm):
        found.requires_grad_(False)


@dataclass(frozen=True, eq=False)
class PackedImages:
    """The images of a micro-batch of T input tokens: P patches of n images."""

    pixels: Tensor
    """One row of D pixel values for each of the P patches, image after image, float32 [P, D]."""
    grids: Tensor
    """(1, height, width) in patches of each image, int64 [n, 3]."""
    positions: Tensor
    """Positions of the tokens within their sequence, int64 [3, 1, T]: in time, height and width."""
    places: Tensor
    """Whether each token is a placeholder of an image, bool [1, T]."""

    def inputs(self) -> dict[str, Tensor]:
        """Keyword arguments with which a model's body is passed these images."""
        return {
            "pixel_values": self.pixels,
            "image_grid_thw": self.grids,
            "position_ids": self.positions,
            PLACES: self.places,
        }


class ImagePacker:
    """Packs the images of samples for one model."""

    def __init__(self, lm: nn.Module, reader: PixelReader):
        self.reader, self.token_id = reader, lm.config.image_token_id
        self._rope_index = lm.base_model.get_rope_index
        self.blank = blank_sample(self.token_id, reader.patch * reader.merge)
        """A sample without targets that has one token of a blank image. A rank without images computes it, since ranks
        must call a sharded vision tower together."""

    @classmethod
    def of(cls, lm: nn.Module, folder: Path) -> "ImagePacker | None":
        """The packer of a policy's folder; None for a policy that takes no images."""
        reader = PixelReader.of(folder) if tower(lm) else None
        return cls(lm, reader) if reader else None

    def tokens_of(self, sample: TrainSample) -> int:
        """Number of tokens of a sample that have the id of an image's placeholder, those that the policy sampled
        included."""
        return int((sample.tokens == self.token_id).sum())

    def pack(self, samples: Sequence[TrainSample], device: torch.device) -> PackedImages:
        """The images of samples that are packed without their last token. Raises ValueError for a sample that lacks
        placeholders of its images."""
        read = {png: self.reader.read(png) for png in dict.fromkeys(png for each in samples for png in each.images)}
        found = [[read[png] for png in each.images] for each in samples]
        positions, places = [], []
        for sample, images in zip(samples, found, strict=True):
            grids = [grid for _, grid in images]
            counts = list(map(self.reader.tokens, grids))
            own = places_of_images(sample.tokens[:-1], self.token_id, counts, sample.image_starts)
            positions.append(self.positions(own, grids))
            places.append(torch.from_numpy(own))
        return PackedImages(
            torch.from_numpy(np.concatenate([rows for images in found for rows, _ in images])).to(device),
            torch.tensor([grid for images in found for _, grid in images]).to(device),
            torch.cat(positions, 2).to(device),
            torch.cat(places)[None].to(device),
        )

    def positions(self, places: np.ndarray, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Positions of a sequence's tokens in time, height and width by the model's own rule, int64 [3, 1, T].
        `places`: whether each token stands for an image, bool [T]; `grids`: (1, height, width) of each image in
        patches."""
        kinds = torch.from_numpy(places).long()[None]
        grid = torch.tensor(grids) if grids else None
        positions: Tensor = self._rope_index(kinds, mm_token_type_ids=kinds, image_grid_thw=grid)[0]
        return positions


def blank_sample(token_id: int, side: int) -> TrainSample:
    """A sample that nothing is trained on, with a black image of `side` pixels squared, which is one token."""
    tokens, black = np.array([0, token_id, 0], np.int32), png_of(np.zeros((side, side, 3), np.uint8))
    return TrainSample(tokens, len(tokens), np.zeros(0, np.float32), 0.0, (), images=(black,))
