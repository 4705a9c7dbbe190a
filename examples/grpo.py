"""GRPO in one file, on April's workers: it learns the quickstart's task, and goes on where it was killed.

    april make-policy && april make-data                # once: the policy and the prompts
    python examples/grpo.py configs/quickstart.toml --run.name grpo --checkpoint grpo.pt

Every key of the configuration can be given as --section.key VALUE. Loss: PPO's clip around the policy that has sampled
a token (Schulman et al. 2017, eq. 7), advantages over the group (Shao et al. 2024), mean over all tokens of a batch.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import april

MICRO_TOKENS = 2048
"""of a micro-batch, with its padding"""
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="TOML file of the run")
    parser.add_argument("--checkpoint", type=Path, default=Path("grpo.pt"), help="file [default grpo.pt]")
    parser.add_argument("--save-every", type=int, default=4, help="steps between checkpoints [default 4]")
    options, rest = parser.parse_known_args()
    overrides = {key.removeprefix("--"): value for key, value in zip(rest[::2], rest[1::2], strict=True)}

    saved = torch.load(options.checkpoint) if options.checkpoint.exists() else {"step": 0}
    with april.connect(options.config, checkpoint=saved["step"], overrides=overrides) as run:
        learner = Learner(run.config, saved)
        run.publish(learner.model)
        for batch in run.batches():
            metrics = learner.step(batch)
            run.consumed(batch, metrics)
            run.publish(learner.model)
            print(f"step {batch.checkpoint}: reward {metrics['reward']:.3f}, loss {metrics['loss']:.4f}", flush=True)
            if batch.checkpoint % options.save_every == 0:
                learner.save(options.checkpoint, batch.checkpoint)
                run.durable(batch)
        learner.save(options.checkpoint, run.step)
        learner.model.save_pretrained(run.config.exported_policy)


class Learner:
    """The policy and its optimizer, in one process."""

    def __init__(self, config, saved: dict):
        self.config = config
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).to(self.device)
        section = config.learner
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=section.lr, betas=section.betas, weight_decay=section.weight_decay
        )
        if saved["step"]:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def step(self, batch) -> dict[str, float]:
        """One optimizer step; samples without an advantage count as tokens, and are not computed."""
        tokens = max(1, int(batch.response_mask.sum()))
        loss, clipped = 0.0, 0.0
        for rows in micro_batches(batch.attention_mask.sum(1), batch.advantages.nonzero()[:, 0]):
            of_rows, clips = self.loss(batch, rows)
            (of_rows / tokens).backward()
            loss, clipped = loss + of_rows.item() / tokens, clipped + clips / tokens
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learner.lr * min(
                1.0, (batch.checkpoint) / max(1, self.config.learner.warmup_steps)
            )
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.learner.grad_clip).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        reward = batch.rewards.mean().item()
        return {"reward": reward, "loss": loss, "clip_fraction": clipped, "grad_norm": grad_norm, "tokens": tokens}

    def loss(self, batch, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The sum over the sampled tokens of some rows, and how many of them are clipped."""
        longest = int(batch.attention_mask[rows].sum(1).max())
        ids, attention, sampled, behaviour = (
            column[rows, :longest].to(self.device)
            for column in (batch.input_ids, batch.attention_mask, batch.response_mask, batch.logprobs)
        )
        advantages = batch.advantages[rows, None].to(self.device)
        logits = self.model(input_ids=ids, attention_mask=attention).logits[:, :-1] / self.config.sampling.temperature
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = torch.where(sampled[:, 1:], logprobs - behaviour[:, 1:], 0.0).exp()
        bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        surrogate = torch.minimum(ratio * advantages, bounded * advantages)
        clipped = (surrogate < ratio * advantages) & sampled[:, 1:]
        return -(surrogate * sampled[:, 1:]).sum(), float(clipped.sum())

    def save(self, path: Path, step: int) -> None:
        """Whole or not at all, and on disk."""
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save({"step": step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            os.fsync(file.fileno())
        partial.replace(path)


def micro_batches(lengths: torch.Tensor, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rows of like length together, the longest first, as many as fit; one that is longer has a micro-batch alone."""
    rows = rows[lengths[rows].argsort(descending=True)]
    while len(rows):
        size = max(1, MICRO_TOKENS // int(lengths[rows[0]]))
        yield rows[:size]
        rows = rows[size:]


if __name__ == "__main__":
    main()
