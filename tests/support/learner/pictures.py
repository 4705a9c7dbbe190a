"""Tiny vision-language models, and samples with images of noise."""

import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from april.learner.batch import TrainingBatch, TrainSample
from april.wire.message import Version

VOCABULARY, IMAGE, START, END = 97, 90, 91, 92
PATCH, MERGE = 4, 2
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}  # fmt: skip
TOWER = {
    "depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2,
    "in_channels": 3,
}  # fmt: skip
FAMILIES = {
    "qwen2_vl": (TEXT, TOWER | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": (
        TEXT,
        TOWER
        | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 16}
        | {"fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        TEXT | {"head_dim": 16},
        TOWER
        | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 36}
        | {"deepstack_visual_indexes": [0, 1]},
    ),
}
"""Keys of language model and vision tower, by `model_type`."""


@torch.no_grad()
def vision_model(family: str, folder: Path, tied: bool = False):
    """A random model of a family, in fp32 in training mode, which is also saved with settings of its image
    processor."""
    torch.manual_seed(0)
    text, vision = FAMILIES[family]
    ids = {"image_token_id": IMAGE, "video_token_id": 93, "vision_start_token_id": START, "vision_end_token_id": END}
    config = AutoConfig.for_model(
        family, text_config=text | {"tie_word_embeddings": tied}, vision_config=vision, tie_word_embeddings=tied, **ids
    )
    lm = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for weight in lm.parameters():
        if weight.dim() < 2:
            weight += 0.3 * torch.randn_like(weight)
        else:
            weight.normal_(0, weight[0].numel() ** -0.5)
    lm.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGE,
        "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "tokenizer.json").write_text("{}")
    return lm.train()


def noise(rng: np.random.Generator, rows: int, columns: int) -> bytes:
    """A PNG of noise that takes rows x columns tokens."""
    side = PATCH * MERGE
    file = io.BytesIO()
    values = rng.integers(256, size=(rows * side, columns * side, 3), dtype=np.uint8)
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def prompt(rng: np.random.Generator, text_tokens: int, sizes: list[tuple[int, int]]) -> tuple[list[int], list[bytes]]:
    """Token ids of a prompt in which text alternates with images of rows x columns tokens, and the images."""
    ids = rng.integers(80, size=text_tokens).tolist()
    for rows, columns in sizes:
        ids += [START, *[IMAGE] * (rows * columns), END, *rng.integers(80, size=2).tolist()]
    return ids, [noise(rng, *size) for size in sizes]


def sample_with_images(
    rng: np.random.Generator, sizes: list[tuple[int, int]], response: list[int], reward: float = 1.0
) -> TrainSample:
    ids, images = prompt(rng, 3, sizes)
    logprobs = rng.normal(-4, 0.3, len(response)).astype(np.float32)
    tokens, span = np.array(ids + response, np.int32), (0, len(response), Version(0, 0))
    return TrainSample(tokens, len(ids), logprobs, reward, (span,), images=tuple(images))


def batch_with_images(step: int = 0) -> TrainingBatch:
    """Groups of which one shares two images, one has a single image, and two have none, the longest among them."""
    rng = np.random.default_rng(step)
    groups = []
    for sizes, lengths in (([(2, 3), (1, 2)], (3, 5)), ([], (40, 30)), ([(3, 2)], (4, 2)), ([], (25, 7))):
        ids, images = prompt(rng, 3, sizes)
        group = []
        for place, length in enumerate(lengths):
            tokens = np.array(ids + rng.integers(80, size=length).tolist(), np.int32)
            logprobs, spans = rng.normal(-4, 0.3, length).astype(np.float32), ((0, length, Version(0, step)),)
            group.append(TrainSample(tokens, len(ids), logprobs, float(place), spans, images=tuple(images)))
        groups.append(group)
    return TrainingBatch(step, groups)
