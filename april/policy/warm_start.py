"""The seeded warm start: first the skill from clean demonstrations, then the bad habits that RL shall remove.

RL selects among the modes a policy has and does not create skill, so the skill must be there before the
noise; the share of noisy demonstrations sets the reward that RL starts from.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch
from transformers import Qwen3ForCausalLM

from april.data.arithmetic import CLEAN, Noise, demonstration, draw_task, draw_times
from april.policy.model import EOS, PAD, VOCABULARY

PAD_ID, EOS_ID = VOCABULARY[PAD], VOCABULARY[EOS]
EASY_TIMES = (2, 3, 4)
HABITS = Noise(p_short=0.30, p_err=0.025, p_stop=0.02, p_skip=0.015)


@dataclass(frozen=True)
class Recipe:
    """What fixes a policy beside its seed."""

    hidden_size: int = 128
    layers: int = 3
    easy_steps: int = 150
    """optimizer steps on K 2 to 4"""
    clean_steps: int = 750
    """on every K"""
    noisy_steps: int = 300
    """on every K, with the noise below"""
    noise: Noise = HABITS
    lr: float = 3e-3
    warmup_steps: int = 30
    final_lr_share: float = 0.1
    """of lr, reached linearly at the last step"""
    batch_tokens: int = 1024
    """padded tokens of a batch"""
    revision: int = 1
    """counts changes of the code that change what a recipe gives"""

    @property
    def steps(self) -> int:
        return self.easy_steps + self.clean_steps + self.noisy_steps


def warm_start(model: Qwen3ForCausalLM, recipe: Recipe, seed: int, log: Callable[[str], None]) -> None:
    """Train the model in place for exactly `recipe.steps` steps. One CPU thread gives the same weights again."""
    started = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(recipe, step))
    for step, (tokens, targets) in enumerate(batches(recipe, seed)):
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD_ID)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 100 == 0 or step + 1 == recipe.steps:
            log(
                f"warm start: step {step + 1}/{recipe.steps}, loss {loss.item():.3f}, "
                f"{time.monotonic() - started:.0f} s"
            )


def lr_share(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then linear decay."""
    decayed = 1.0 - (1.0 - recipe.final_lr_share) * step / recipe.steps
    return min((step + 1) / recipe.warmup_steps, decayed)


def batches(recipe: Recipe, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, targets), int64 [B, T] each, padded right; prompt positions have no target."""
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
    """Batches of like length from pools of demonstrations, in shuffled order, without end."""
    while True:
        pool = []
        for _ in range(256):
            times = random.choice(allowed_times) if allowed_times else draw_times(random)
            task = draw_task(random, "train", times)
            pool.append((task.prompt, demonstration(task, noise, random)))
        cut = batches_of_like_length(pool, recipe.batch_tokens)
        random.shuffle(cut)
        yield from cut


def batches_of_like_length(pool: list[tuple[str, str]], batch_tokens: int) -> list[list[tuple[str, str]]]:
    cut = [[]]
    for example in sorted(pool, key=text_tokens):
        if cut[-1] and text_tokens(example) * (len(cut[-1]) + 1) > batch_tokens:
            cut.append([])
        cut[-1].append(example)
    return cut


def text_tokens(example: tuple[str, str]) -> int:
    prompt, response = example
    return len(prompt) + len(response)


def padded(examples: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(text_tokens, examples))
    tokens = torch.full((len(examples), width), PAD_ID)
    targets = torch.full((len(examples), width), PAD_ID)
    for i, (prompt, response) in enumerate(examples):
        ids = torch.tensor([*map(VOCABULARY.__getitem__, prompt + response), EOS_ID])
        tokens[i, : len(ids) - 1] = ids[:-1]
        targets[i, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    return tokens, targets
