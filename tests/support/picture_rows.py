"""Pictures, rows that have them, and the folder of a policy that reads them, without its weights."""

import io
import json

from PIL import Image

from april import wire
from april.learner.policy.arithmetic import build_tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""A chat template that prints images as those of Qwen do."""


def picture(color="red", size=(16, 16), kind="PNG"):
    """The file of a picture of one colour."""
    content = io.BytesIO()
    Image.new("RGB", size, color).save(content, kind)
    return content.getvalue()


def image_files(config):
    """Names of the images in a run's folder."""
    return {path.stem for path in (config.run_dir / "images").glob("*")}


def fetched(peer, names):
    """A broker's answer to a peer that asks for images: their files by name."""
    peer.say(wire.FetchImages(names))
    [received] = peer.take(wire.Images)
    return dict(zip(received.message.names, (bytes(array.data) for array in received.packed), strict=True))


def write_picture_tokenizer(folder, config=None):
    """Write tokeniser, chat template and image processor of a vision model, and a `config.json` that knows its
    placeholder; a picture of 16 by 16 pixels has four tokens. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = build_tokenizer()
    inner.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]})
    inner.chat_template = TEMPLATE
    inner.save_pretrained(folder)
    known = config or {"model_type": "qwen3_vl"}
    known |= {"image_token_id": inner.convert_tokens_to_ids("<|image_pad|>")}
    (folder / "config.json").write_text(json.dumps(known))
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2}
    processor |= {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
