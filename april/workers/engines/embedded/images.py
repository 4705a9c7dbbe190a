"""What transformers' vision-language models are passed of the images of contexts that are prefilled together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from april.data.pixels import PLACES, PixelReader, places_of_images, take_image_places
from april.workers.engines.base import EngineError, Request


class Context(NamedTuple):
    """What is prefilled of one request: token ids, and the images among them as in `Request`."""

    tokens: tuple[int, ...]
    images: tuple[bytes, ...] = ()
    image_starts: tuple[int, ...] = ()


class ImageInputs:
    """Reads images for one model."""

    def __init__(self, reader: PixelReader, token_id: int):
        self.reader, self.token_id = reader, token_id

    @classmethod
    def of(cls, folder: Path, config: PreTrainedConfig) -> "ImageInputs | None":
        """For the model of a folder; None if it takes no images."""
        takes_any = hasattr(config, "image_token_id") and hasattr(config, "vision_config")
        reader = PixelReader.of(folder) if takes_any else None
        return cls(reader, config.image_token_id) if reader else None

    def check(self, request: Request) -> None:
        """Raises EngineError for a request that lacks placeholders of its images."""
        try:
            self.places(request.tokens, self.read(request.images), request.image_starts)
        except (ValueError, OSError) as error:
            raise EngineError(f"request {request.id} cannot be shown its images: {error}") from error

    def read(self, images: Sequence[bytes]) -> list[tuple[np.ndarray, tuple[int, int, int]]]:
        return [self.reader.read(png) for png in images]

    def places(self, tokens: Sequence[int] | np.ndarray, read: list, starts: Sequence[int]) -> np.ndarray:
        counts = [self.reader.tokens(grid) for _, grid in read]
        return places_of_images(np.asarray(tokens), self.token_id, counts, starts)

    def inputs(self, lm: Any, contexts: Sequence[Context], mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Positions of padded contexts in three axes by the model's own rule, int64 [3, n, L], and what a prefill is
        passed beside them. `mask`: int64 [n, L], 0 for padding. Some context has an image."""
        read = [self.read(context.images) for context in contexts]
        places = torch.zeros(mask.shape, dtype=torch.bool)
        for row, ((tokens, _, starts), images) in enumerate(zip(contexts, read, strict=True)):
            places[row, -len(tokens) :] = torch.from_numpy(self.places(tokens, images, starts))
        grids = torch.tensor([grid for images in read for _, grid in images])
        kinds, host = places.long(), mask.cpu()
        positions, _ = lm.base_model.get_rope_index(
            kinds, mm_token_type_ids=kinds, image_grid_thw=grids, attention_mask=host
        )
        pixels = torch.from_numpy(np.concatenate([rows for images in read for rows, _ in images]))
        shown = {"pixel_values": pixels, "image_grid_thw": grids, PLACES: places}
        return positions.to(mask.device), {name: value.to(mask.device) for name, value in shown.items()}


def prepare(lm: Any) -> None:
    """Have a new model take the places of images from its caller."""
    if hasattr(lm.base_model, "get_placeholder_mask"):
        take_image_places(lm.base_model)
