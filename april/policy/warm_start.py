"""Seeded warm start of the quickstart policy: supervised training on clean demonstrations, then on noisy ones.

RL selects among the behaviours a policy has and does not create skill, so the skill is trained first. The noisy
demonstrations add the errors that RL removes, and their rate sets the reward that RL starts from.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Qwen3ForCausalLM

from april.data.arithmetic import CLEAN, Noise, demonstration, draw_task, draw_times
from april.policy.model import EOS, PAD, VOCABULARY
from april.policy.muon import Muon

PAD_ID, EOS_ID = VOCABULARY[PAD], VOCABULARY[EOS]
EASY_TIMES = (2, 3, 4)

HABITS = Noise(p_short=0.44, p_err=0.015, p_stop=0.012, p_skip=0.009)
"""Noise chosen for a reward of about 0.5 at temperature 1; the policy reproduces three of four shortcuts in its
demonstrations."""


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of a warm start; recipe and seed determine the policy."""

    hidden_size: int = 128
    layers: int = 3
    easy_steps: int = 60
    """Optimizer steps on tasks with K = 2, 3 and 4 (`ArithmeticTask.times`)."""
    clean_steps: int = 400
    """Optimizer steps on tasks of every K."""
    noisy_steps: int = 140
    """Optimizer steps on tasks of every K, with `noise`."""
    noise: Noise = HABITS
    muon_lr: float = 0.02
    """Peak learning rate of the matrices inside the layers (Muon)."""
    adamw_lr: float = 3e-3
    """Peak learning rate of embeddings and norms (AdamW)."""
    warmup_steps: int = 30
    """Optimizer steps of linear learning-rate warm-up."""
    final_lr_share: float = 0.1
    """Final learning rate as a share of the peak, reached linearly at the last step."""
    average_decay: float = 0.98
    """Decay of the moving average of the weights over the noisy steps; the average is the policy."""
    batch_tokens: int = 1024
    """Padded tokens per batch."""
    revision: int = 2
    """Number of code changes that changed the result of a recipe."""

    @property
    def steps(self) -> int:
        return self.easy_steps + self.clean_steps + self.noisy_steps


def warm_start(model: Qwen3ForCausalLM, recipe: Recipe, seed: int, log: Callable[[str], None]) -> None:
    """Train the model in place for exactly `recipe.steps` steps. Reproducible on one CPU thread."""
    started = time.monotonic()
    optimizers = build_optimizers(model, recipe)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(recipe, step)) for optimizer in optimizers
    ]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.average_decay))
    for step, (tokens, targets) in enumerate(batches(recipe, seed), start=1):
        loss = token_loss(model, tokens, targets)
        (loss.sum() / recipe.batch_tokens).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step > recipe.steps - recipe.noisy_steps:
            average.update_parameters(model)
        if step % 60 == 0 or step == recipe.steps:
            mean_loss = loss.sum().item() / (targets != PAD_ID).sum().item()
            log(f"warm start: step {step}/{recipe.steps}, loss {mean_loss:.3f}, {time.monotonic() - started:.0f} s")
    if recipe.noisy_steps:
        model.load_state_dict(average.module.state_dict())


def build_optimizers(model: Qwen3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, which learn in a fifth of AdamW's steps; AdamW for embeddings and
    norms."""
    inner = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    inner_ids = {id(parameter) for parameter in inner}
    outer = [parameter for parameter in model.parameters() if id(parameter) not in inner_ids]
    return [
        Muon(inner, lr=recipe.muon_lr),
        torch.optim.AdamW(outer, lr=recipe.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def token_loss(model: Qwen3ForCausalLM, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each token (nats), [B * T]; zero where there is no target."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD_ID, reduction="none")


def lr_share(recipe: Recipe, step: int) -> float:
    """Learning rate of a step as a share of the peak: linear warm-up, then linear decay."""
    decayed = 1.0 - (1.0 - recipe.final_lr_share) * step / recipe.steps
    return min((step + 1) / recipe.warmup_steps, decayed)


def batches(recipe: Recipe, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """All batches of a warm start: (tokens, targets), int64 [B, T] each, padded right; prompt positions have no
    target."""
    random = Random(seed)
    phases = (
        (recipe.easy_steps, CLEAN, EASY_TIMES),
        (recipe.clean_steps, CLEAN, None),
        (recipe.noisy_steps, recipe.noise, None),
    )
    for steps, noise, allowed_times in phases:
        stream = phase_batches(recipe, random, noise, allowed_times)
        for _ in range(steps):
            yield padded(next(stream))


def phase_batches(
    recipe: Recipe, random: Random, noise: Noise, allowed_times: tuple[int, ...] | None
) -> Iterator[list[tuple[str, str]]]:
    """Endless stream of batches of similar length, in shuffled order, from pools of 256 demonstrations."""
    while True:
        pool = []
        for _ in range(256):
            times = random.choice(allowed_times) if allowed_times else draw_times(random)
            task = draw_task(random, "train", times)
            pool.append((task.prompt, demonstration(task, noise, random)))
        cut = batches_of_similar_length(pool, recipe.batch_tokens)
        random.shuffle(cut)
        yield from cut


def batches_of_similar_length(pool: list[tuple[str, str]], batch_tokens: int) -> list[list[tuple[str, str]]]:
    """Split (prompt, response) pairs, sorted by length, into batches of at most `batch_tokens` padded tokens."""
    cut: list[list[tuple[str, str]]] = [[]]
    for example in sorted(pool, key=text_tokens):
        if cut[-1] and text_tokens(example) * (len(cut[-1]) + 1) > batch_tokens:
            cut.append([])
        cut[-1].append(example)
    return cut


def text_tokens(example: tuple[str, str]) -> int:
    prompt, response = example
    return len(prompt) + len(response)


def padded(examples: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets) of (prompt, response) pairs, int64 [B, T] each; PAD_ID where there is no target."""
    width = max(map(text_tokens, examples))
    tokens = torch.full((len(examples), width), PAD_ID)
    targets = torch.full((len(examples), width), PAD_ID)
    for i, (prompt, response) in enumerate(examples):
        ids = torch.tensor([*map(VOCABULARY.__getitem__, prompt + response), EOS_ID])
        tokens[i, : len(ids) - 1] = ids[:-1]
        targets[i, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    return tokens, targets
