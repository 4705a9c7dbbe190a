"""A picture is prepared once, and the model's own image processor keeps what comes out."""

import io
import json
from random import Random

import pytest
from PIL import Image

from april.data.images import SOURCE_PIXELS, ImageRule, name_of, prepare
from april.data.rows import BadRow

RULE = ImageRule(token_id=7, patch=4, merge=2, min_pixels=16 * 16, max_pixels=64 * 64)


def file_of(image, kind="PNG", **options):
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def prepared(image, kind="PNG", rule=RULE, **options):
    return Image.open(io.BytesIO(prepare(file_of(image, kind, **options), rule).png))


@pytest.mark.parametrize("rule", [ImageRule(0), ImageRule(0, 16, 2, 65536, 16777216), RULE])
def test_sizes_are_those_of_transformers(rule):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    random = Random(0)
    for _ in range(2000):
        size = (random.randint(1, 3000), random.randint(1, 3000))
        if max(size) <= 200 * min(size):
            assert rule.size(*size) == smart_resize(*size, rule.patch * rule.merge, rule.min_pixels, rule.max_pixels)


def test_the_processor_of_the_model_keeps_a_prepared_image():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=RULE.min_pixels, max_pixels=RULE.max_pixels)
    for size in ((300, 200), (3, 5), (64, 8), (9, 170)):
        image = prepare(file_of(Image.effect_noise(size, 90).convert("RGB")), RULE)
        found = processor(Image.open(io.BytesIO(image.png)), return_tensors="np")
        kept = processor(Image.open(io.BytesIO(image.png)), do_resize=False, return_tensors="np")
        assert found["image_grid_thw"].tolist() == [[1, *image.grid]]
        assert (found["pixel_values"] == kept["pixel_values"]).all()
        assert image.tokens == len(found["pixel_values"]) // RULE.merge**2


def test_a_photograph_is_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to the right
    lying = Image.new("RGB", (32, 16), "red")
    lying.paste("blue", (0, 0, 16, 16))
    upright = prepared(lying, "JPEG", quality=100, exif=exif)
    assert upright.size == (16, 32)
    red, _, blue = upright.getpixel((8, 4))
    assert blue > 200 > 50 > red


def test_transparent_parts_are_white():
    assert prepared(Image.new("RGBA", (16, 16), (0, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (16, 16))
    assert prepared(palette, "GIF", transparency=0).getpixel((3, 3)) == (255, 255, 255)


def test_a_name_is_that_of_the_pixels():
    image = Image.effect_noise((16, 16), 60).convert("RGB")
    first = prepare(file_of(image, dpi=(300, 300)), RULE)
    assert first == prepare(file_of(image, "BMP"), RULE)
    assert first.name == name_of(first.png)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (b"no picture", "cannot be decoded"),
        (file_of(Image.effect_noise((64, 64), 60))[:900], "cannot be decoded"),
        (file_of(Image.new("1", (SOURCE_PIXELS // 4000 + 1, 4000))), "pixels, more than"),
        (file_of(Image.new("L", (601, 3))), "too narrow"),
        (file_of(Image.new("I;16", (16, 16))), "8 bits"),
        (bytes(32 << 20) + b"more", "bytes, more than"),
    ],
    ids=["no picture", "a part of one", "many pixels", "narrow", "16 bits", "many bytes"],
)
def test_what_cannot_be_prepared_is_refused_with_a_sentence(source, why):
    with pytest.raises(BadRow, match=why):
        prepare(source, RULE)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_the_rule_is_read_beside_the_policy(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": 151655}))
    assert ImageRule.of(tmp_path) is None
    settings = {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    settings["image_processor_type"] = "Qwen2VLImageProcessorFast"
    inside = settings if name.startswith("pre") else {"image_processor": settings}
    (tmp_path / name).write_text(json.dumps(inside))
    assert ImageRule.of(tmp_path) == ImageRule(151655, 16, 2, 65536, 16777216)
