"""Rows of pixels are those of transformers' own image processor."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from april.data.pixels import PixelReader, places_of_images


def png_of(width: int, height: int) -> tuple[Image.Image, bytes]:
    values = np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)
    image, file = Image.fromarray(values), io.BytesIO()
    image.save(file, "PNG")
    return image, file.getvalue()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"patch_size": 16, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
        {"patch_size": 4, "merge_size": 1, "temporal_patch_size": 1},
        {"do_normalize": False},
        {"do_rescale": False},
    ],
    ids=["qwen2.5-vl", "qwen3-vl", "small", "not normalised", "not rescaled"],
)
def test_rows_equal_those_of_transformers(settings, tmp_path):
    processor = Qwen2VLImageProcessorPil(**settings)
    processor.save_pretrained(tmp_path)
    side = processor.patch_size * processor.merge_size
    image, png = png_of(width=3 * side, height=2 * side)
    theirs = processor(images=[image], do_resize=False, return_tensors="np")
    reader = PixelReader.of(tmp_path)
    rows, grid = reader.read(png)
    assert rows.dtype == np.float32 and np.array_equal(rows, theirs["pixel_values"])
    assert list(grid) == theirs["image_grid_thw"][0].tolist()
    assert reader.tokens(grid) == 6


def test_settings_inside_those_of_a_processor_are_found(tmp_path):
    assert PixelReader.of(tmp_path) is None
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"patch_size": 16}}))
    assert PixelReader.of(tmp_path).patch == 16


def test_sampled_placeholder_is_text():
    tokens = np.array([5, 9, 9, 7, 9, 3])
    assert places_of_images(tokens, 9, [2]).tolist() == [False, True, True, False, False, False]
    with pytest.raises(ValueError, match=r"4 tokens.* 3 of"):
        places_of_images(tokens, 9, [2, 2])


def test_an_image_that_was_shown_after_a_sampled_placeholder_has_its_own_ones():
    tokens = np.array([9, 5, 9, 7, 9, 9, 3, 9])
    assert np.flatnonzero(places_of_images(tokens, 9, [1, 2], [1, 3])).tolist() == [2, 4, 5]
    assert np.flatnonzero(places_of_images(tokens, 9, [1, 2], [0, 1])).tolist() == [0, 2, 4]
    with pytest.raises(ValueError, match="take 3 tokens"):
        places_of_images(tokens, 9, [1, 2], [1, 6])
