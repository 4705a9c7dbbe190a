"""The preparation of a picture, once, for all later readers: engine, learner, server and dashboard.

A picture in any common format becomes a PNG of the size at which the model's image processor takes it as it is, so
that all of them see equal pixels. The file's sha256 is the image's name. Needs Pillow, and no torch.
"""

import hashlib
import io
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from april.config import ConfigError
from april.data.rows import BadRow
from april.util.text import first_line

SOURCE_BYTES = 32 << 20
"""Largest file of a picture that is accepted (bytes)."""
SOURCE_PIXELS = 64 << 20
"""Most pixels of a picture before it is resized: a small file can unpack into gigabytes."""
PROMPT_IMAGES = 64
"""Largest number of images that a prompt may have."""
ASPECT_RATIO = 200
"""Largest ratio of a picture's longer to its shorter side; Qwen's image processors have the same limit."""
PNG_BYTES = 64 << 20
"""Largest file of a prepared image that is accepted (bytes)."""
PNG_HEAD_BYTES = 24
"""Number of bytes at the start of a PNG file that include its width and height."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are decoded, as Pillow names them; of an animation the first frame counts."""
TIFF_MODES = ("CMYK", "YCbCr", "LAB")
"""Pillow's colour modes that TIFF can store and PNG cannot."""
NO_IMAGES = "the policy takes no images"
PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""Image processors of transformers whose resizing `ImageRule` reproduces: those of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and
Qwen3.5."""


@dataclass(frozen=True)
class ImageRule:
    """Rule by which a model's image processor sizes pictures, and the placeholder that stands for an image in a
    prompt."""

    token_id: int
    """Id of the placeholder token; a prompt has one for each of an image's `tokens`."""
    patch: int = 14
    """Side of a patch (pixels)."""
    merge: int = 2
    """Patches along a side of the square that becomes one token."""
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    @classmethod
    def of(cls, folder: Path) -> "ImageRule | None":
        """The rule of a policy's folder; None for a policy that takes no images. Raises ConfigError for one whose
        image processor April does not know."""
        processor, token_id = processor_config(folder), read_json(folder / "config.json").get("image_token_id")
        if not processor or token_id is None:
            return None
        name = processor.get("image_processor_type") or processor.get("feature_extractor_type")
        if name not in PROCESSORS:
            raise ConfigError(
                f"model.path = {str(folder)!r} has the image processor {name!r}, whose sizes April does not know; "
                f"use a model with one of {', '.join(PROCESSORS)}"
            )
        size = processor.get("size") or {}
        least = processor.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or cls.min_pixels
        most = processor.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or cls.max_pixels
        patch, merge = processor.get("patch_size", cls.patch), processor.get("merge_size", cls.merge)
        return cls(int(token_id), int(patch), int(merge), int(least), int(most))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels to which a picture is resized: multiples of a token's side, with about the same
        aspect ratio, and between `min_pixels` and `max_pixels`. As `smart_resize` of transformers. Raises BadRow."""
        side = self.patch * self.merge
        if max(height, width) > ASPECT_RATIO * min(height, width):
            raise BadRow(f"an image of {width} x {height} pixels is too narrow; the longer side is at most 200 times")
        fitted = [round(edge / side) * side for edge in (height, width)]
        if math.prod(fitted) > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            fitted = [max(side, math.floor(edge / shrink / side) * side) for edge in (height, width)]
        elif math.prod(fitted) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            fitted = [math.ceil(edge * grow / side) * side for edge in (height, width)]
        return fitted[0], fitted[1]

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in patches of a prepared image of this size in pixels."""
        return height // self.patch, width // self.patch

    def tokens(self, height: int, width: int) -> int:
        """Number of tokens of a prepared image of this size in pixels."""
        return height * width // (self.patch * self.merge) ** 2


@dataclass(frozen=True)
class PreparedImage:
    name: str
    """sha256 of `png` in hex."""
    png: bytes
    """The image as a lossless PNG, RGB with 8 bits a value, of a size that the model's image processor keeps."""
    grid: tuple[int, int]
    """(height, width) in patches."""
    tokens: int
    """Tokens of the prompt that the image takes: patches / merge²."""


def prepare(source: bytes, rule: ImageRule) -> PreparedImage:
    """Prepare a picture for a model: upright by its EXIF data, RGB with transparent parts white, resized by `rule`.

    `source`: the bytes of its file. Raises BadRow for a file that is no picture, or one too large or too narrow.
    """
    if len(source) > SOURCE_BYTES:
        raise BadRow(f"an image has {len(source):,} bytes, more than {SOURCE_BYTES:,}; save it smaller")
    upright = decoded(source)
    height, width = rule.size(upright.height, upright.width)
    if rule.size(height, width) != (height, width):
        raise BadRow(
            f"an image of {upright.width} x {upright.height} pixels has no size between the {rule.min_pixels} and "
            f"{rule.max_pixels} pixels of the model's image processor; crop it, or widen that range"
        )
    if (upright.width, upright.height) != (width, height):
        upright = upright.resize((width, height), pillow().Resampling.BICUBIC)
    upright.info = {}  # what would be written beside the pixels
    file = io.BytesIO()
    upright.save(file, "PNG", compress_level=1)
    png = file.getvalue()
    if len(png) > PNG_BYTES:
        raise BadRow(
            f"an image of {width} x {height} pixels takes {len(png):,} bytes as a PNG, more than {PNG_BYTES:,}; lower "
            "the greatest number of pixels of the model's image processor"
        )
    return PreparedImage(name_of(png), png, rule.grid(height, width), rule.tokens(height, width))


def check_prepared(png: bytes, rule: ImageRule | None) -> None:
    """Check the file of an image that another process has prepared: a whole PNG, RGB with 8 bits a value, of a size
    that `rule` keeps. Its values are not decoded. `rule`: None if the policy takes no images, so that any is refused.
    Raises BadRow."""
    if rule is None:
        raise BadRow(NO_IMAGES)
    try:
        image = pillow().open(io.BytesIO(png), formats=("PNG",))
        is_prepared = image.mode == "RGB" and rule.size(image.height, image.width) == (image.height, image.width)
        image.verify()
    except Exception as error:  # what Pillow raises of a damaged file has no bounds
        raise BadRow(f"a prepared image of {len(png):,} bytes cannot be read ({first_line(error)})") from None
    if not is_prepared:
        raise BadRow(f"an image of {image.width} x {image.height} pixels and mode {image.mode} is not prepared")


def name_of(png: bytes) -> str:
    """Name of a prepared image: the sha256 of its file in hex."""
    return hashlib.sha256(png).hexdigest()


def png_size(head: bytes) -> tuple[int, int]:
    """(height, width) in pixels, from the first `PNG_HEAD_BYTES` of a PNG file. Raises struct.error for fewer bytes."""
    width, height = struct.unpack_from(">II", head, PNG_HEAD_BYTES - 8)
    return height, width


def decoded(source: bytes) -> Any:
    """Decode the bytes of a picture's file to a Pillow image, upright and RGB. Raises BadRow."""
    image_module = pillow()
    from PIL import ImageOps

    try:
        image = image_module.open(io.BytesIO(source), formats=FORMATS)
        if image.width * image.height > SOURCE_PIXELS:
            raise BadRow(
                f"an image has {image.width} x {image.height} pixels, more than {SOURCE_PIXELS:,}; save it smaller"
            )
        if image.mode.startswith(("I", "F")):
            raise BadRow(f"an image has values of mode {image.mode!r}; save it with 8 bits a value")
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            white = image_module.new("RGBA", image.size, "white")
            image = image_module.alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")
    except BadRow:
        raise
    except Exception as error:  # what Pillow raises of a damaged file has no bounds
        raise BadRow(
            f"an image of {len(source):,} bytes cannot be decoded ({first_line(error)}); give {', '.join(FORMATS)}"
        ) from None


def file_of(image: Any) -> bytes:
    """Encode a Pillow image losslessly as PNG or TIFF, upright by its EXIF data; returns b"" for any other object.
    Raises BadRow for an image that cannot be stored."""
    if not isinstance(image, pillow().Image):
        return b""
    from PIL import ImageOps

    file = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        upright.save(file, "TIFF" if upright.mode in TIFF_MODES else "PNG")
    except Exception as error:  # what Pillow raises of an image in memory has no bounds
        raise BadRow(
            f"an image of mode {image.mode!r} cannot be stored ({first_line(error)}); convert it to RGB"
        ) from None
    return file.getvalue()


def pillow() -> Any:
    """The module PIL.Image. Raises ConfigError where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            "rows with images need Pillow, which is not installed; `pip install 'april-rl[images]'`"
        ) from None
    return Image


def processor_config(folder: Path) -> dict[str, Any]:
    """Settings of the image processor in a policy's folder; empty without one."""
    return read_json(folder / "preprocessor_config.json") or (
        read_json(folder / "processor_config.json").get("image_processor") or {}
    )


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_bytes()) if file.is_file() else {}
