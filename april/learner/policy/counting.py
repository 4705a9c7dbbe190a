"""The policy of the task in pictures (`april/data/shapes.py`): a tiny Qwen3-VL, made once per recipe and seed by a warm
start on demonstrations, some of which guess instead of counting. RL removes the guesses."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from april.data.pixels import PixelReader, png_of
from april.data.shapes import LARGEST_COUNT, SIDE, CountingTask, draw_tasks
from april.learner.optimizers.muon import MuonInFloat32
from april.learner.policy.arithmetic import EOS, PAD, build_tokenizer
from april.learner.policy.made_once import make_once

START, IMAGE, VIDEO, END = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"
VOCABULARY = {token: i for i, token in enumerate((PAD, EOS, START, IMAGE, VIDEO, END, *"0123456789#?RGB"))}
PATCH, MERGE, MEAN = 4, 2, (0.5, 0.5, 0.5)
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""Chat template that concatenates contents, with the placeholder of each image."""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 1,
    "size": {"shortest_edge": 64, "longest_edge": 4096}, "image_mean": MEAN, "image_std": MEAN,
}  # fmt: skip
Batch = tuple[Tensor, Tensor, Tensor]
"""Token ids and targets, int64 [B, T] each, `PAD` where there is none, and the patches of B pictures, one picture after
the other, [patches, values of a patch]."""


@dataclass(frozen=True)
class CountingRecipe:
    """Hyper-parameters of the warm start; recipe and seed determine the policy."""

    hidden_size: int = 96
    layers: int = 3
    clean_steps: int = 200
    """Optimizer steps on error-free demonstrations."""
    noisy_steps: int = 80
    """Optimizer steps on demonstrations of which some guess (`p_guess`)."""
    p_guess: float = 0.5
    """Share of the noisy demonstrations that guess, which makes the reward from which RL starts: about 0.5 at
    temperature 1."""
    muon_lr: float = 0.02
    """Peak learning rate of the matrices inside the layers (Muon)."""
    adamw_lr: float = 3e-3
    """Peak learning rate of embeddings and norms (AdamW)."""
    warmup_steps: int = 30
    """Optimizer steps of linear learning-rate warm-up."""
    final_lr_share: float = 0.1
    """Final learning rate as a share of the peak, reached linearly at the last step."""
    average_decay: float = 0.95
    """Decay of the moving average of the weights over the noisy steps; the average is the policy."""
    batch_tokens: int = 1536
    """Tokens of a batch."""
    revision: int = 3
    """Revision of the warm start's code, increased whenever the same recipe gives another policy."""

    @property
    def steps(self) -> int:
        return self.clean_steps + self.noisy_steps


RECIPE = CountingRecipe()


def make_counting_policy(
    out_dir: str | Path, seed: int = 0, recipe: CountingRecipe = RECIPE, log: Callable[[str], None] = print
) -> Path:
    """Return the folder of the policy; creates it if it does not exist, in about a minute on one core. `out_dir`
    appears only once it is complete. Raises ConfigError if `out_dir` holds something else."""
    out_dir, made_from = Path(out_dir), {"recipe": asdict(recipe), "seed": seed}

    def make(folder: Path) -> int:
        model = build_model(recipe, seed)
        with one_thread():
            warm_start(model, recipe, seed, log)
        transformers.utils.logging.disable_progress_bar()
        save_policy(model, folder)
        return model.num_parameters()

    return make_once(out_dir, made_from, make, log)


def save_policy(model: Qwen3VLForConditionalGeneration, out_dir: Path) -> None:
    model.save_pretrained(out_dir)
    build_tokenizer(VOCABULARY, TEMPLATE, [START, IMAGE, VIDEO, END]).save_pretrained(out_dir)
    (out_dir / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


def build_model(recipe: CountingRecipe, seed: int) -> Qwen3VLForConditionalGeneration:
    """A Qwen3-VL with random fp32 weights drawn from the seed; each cell of a picture is one token."""
    heads = recipe.hidden_size // 32
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {
        "vocab_size": len(VOCABULARY), "hidden_size": recipe.hidden_size, "num_hidden_layers": recipe.layers,
        "intermediate_size": recipe.hidden_size * 5 // 2, "num_attention_heads": heads, "num_key_value_heads": 1,
        "head_dim": 32, "max_position_embeddings": 512, "rope_parameters": rope, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": VOCABULARY[EOS], "pad_token_id": VOCABULARY[PAD],
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": recipe.hidden_size,
        "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 1, "deepstack_visual_indexes": [0],
        "num_position_embeddings": (SIDE * MERGE) ** 2,
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, dtype="float32",
        image_token_id=VOCABULARY[IMAGE], video_token_id=VOCABULARY[VIDEO], vision_start_token_id=VOCABULARY[START],
        vision_end_token_id=VOCABULARY[END],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration(config)


def warm_start(
    model: Qwen3VLForConditionalGeneration, recipe: CountingRecipe, seed: int, log: Callable[[str], None]
) -> None:
    """Train the model in place for `recipe.steps` steps. `seed`: of the demonstrations. `log` is called with lines on
    progress. Reproducible on one CPU thread."""
    started, size = time.monotonic(), recipe.batch_tokens // len(prompt_ids("R"))
    inner = [each for each in model.model.parameters() if each.ndim == 2 and min(each.shape) >= 32]
    inner_ids = {id(each) for each in inner}
    outer = [each for each in model.parameters() if id(each) not in inner_ids]
    matrices = MuonInFloat32(inner, lr=recipe.muon_lr, weight_decay=0.0)
    optimizers = [matrices, torch.optim.AdamW(outer, lr=recipe.adamw_lr, weight_decay=0.0)]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(recipe, step)) for optimizer in optimizers
    ]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.average_decay))
    for step, batch in enumerate(islice(batches(recipe, seed, size), recipe.steps), start=1):
        loss = token_loss(model, *batch)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step > recipe.steps - recipe.noisy_steps:
            average.update_parameters(model)
        if step % 50 == 0 or step == recipe.steps:
            log(f"warm start: step {step}/{recipe.steps}, loss {loss.item():.3f}, {time.monotonic() - started:.0f} s")
    model.load_state_dict(average.module.state_dict())


def lr_share(recipe: CountingRecipe, step: int) -> float:
    """Learning rate of a step as a share of the peak: linear warm-up, then linear decay."""
    decayed = 1.0 - (1.0 - recipe.final_lr_share) * step / recipe.steps
    return min((step + 1) / recipe.warmup_steps, decayed)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager under which torch uses one CPU thread, for reproducible floating-point sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def token_loss(model: Qwen3VLForConditionalGeneration, tokens: Tensor, targets: Tensor, pixels: Tensor) -> Tensor:
    """Mean cross-entropy of the targets (nats), without those that are `PAD`; `tokens`, `targets` and `pixels` are
    those of a `Batch`."""
    grids = torch.tensor([[1, SIDE * MERGE, SIDE * MERGE]] * len(tokens))
    kinds = (tokens == VOCABULARY[IMAGE]).int()
    logits = model(
        input_ids=tokens, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds, use_cache=False
    ).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=VOCABULARY[PAD])


def batches(recipe: CountingRecipe, seed: int, size: int) -> Iterator[Batch]:
    """Endless batches of `size` demonstrations; after `recipe.clean_steps` batches the share `recipe.p_guess` of them
    guesses."""
    random, step = Random(seed), 0
    tasks = draw_tasks("train", random)
    while True:
        chance = recipe.p_guess if step >= recipe.clean_steps else 0.0
        yield batch_of([(task, guess_of(task, random, chance)) for task in islice(tasks, size)])
        step += 1


def guess_of(task: CountingTask, random: Random, chance: float) -> int | None:
    """With the probability `chance` a wrong answer to `task`, drawn at random, for a demonstration that guesses;
    otherwise None, for a demonstration that counts."""
    if random.random() >= chance:
        return None
    return random.choice([count for count in range(LARGEST_COUNT + 1) if count != int(task.answer)])


def prompt_ids(colour: str) -> list[int]:
    placeholders = [VOCABULARY[START], *[VOCABULARY[IMAGE]] * SIDE**2, VOCABULARY[END]]
    return [*placeholders, VOCABULARY[colour], VOCABULARY["?"]]


def batch_of(examples: list[tuple[CountingTask, int | None]]) -> Batch:
    reader = PixelReader(PATCH, MERGE, 1, MEAN, MEAN)
    width, pad = len(prompt_ids("R")) + SIDE + 2, VOCABULARY[PAD]
    tokens, targets = (torch.full((len(examples), width), pad) for _ in range(2))
    for row, (task, guess) in enumerate(examples):
        prompt, response = prompt_ids(task.colour), [VOCABULARY[each] for each in task.demonstration(guess)]
        ids = torch.tensor([*prompt, *response, VOCABULARY[EOS]])
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    rows = [reader.read(png_of(task.pixels()))[0] for task, _ in examples]
    return tokens, targets, torch.from_numpy(np.concatenate(rows))
