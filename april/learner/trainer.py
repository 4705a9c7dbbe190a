"""One optimizer step a batch: advantages, plan, packed forward and backward passes, clipping, AdamW.

The same batch, checkpoint and number of ranks give bitwise the same weights on CPU.
"""

import math
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from april.config import Config
from april.learner import checkpoint, losses
from april.learner.batch import Batch, TrainSample
from april.learner.model import full_state, load, shard
from april.learner.packing import MicroBatch, input_tokens, pack, plan


class Trainer:
    """The sharded policy, its optimizer and how far they have come. Every method is collective.

    `step_count` is the number of batches consumed, the step of the policy version that the weights are now;
    `optimizer_steps` leaves out the batches that changed nothing.
    """

    def __init__(self, config: Config, device: torch.device):
        """Load `config.model.path` onto every rank of the default process group and shard it."""
        self.config = config
        self.device = device
        self.directory = config.run_dir / "checkpoints"
        self.policy = shard(load(config.model.path, config.sampling.temperature), device)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=config.learner.lr,
            betas=config.learner.betas,
            weight_decay=config.learner.weight_decay,
            fused=True,
        )
        self.step_count = 0
        self.optimizer_steps = 0

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on `batch` and return metrics, equal on all ranks but for the seconds (`*_s`).

        Samples with advantage 0 have no gradient and are not computed, though their tokens count in the mean;
        `entropy`, `kl`, `clip_fraction` and `ratio_*` are over the `trained_tokens` that were, and absent when
        there were none. Then, or when loss or gradient are not finite, the weights stay as they are
        (`update_skipped` 1) and the batch counts as consumed.
        """
        seconds = PhaseSeconds(self.device)
        with seconds("plan_s"):
            trained, zero_spread = trained_samples(batch)
            total_tokens = sum(sample.response_tokens for sample in batch.samples)
            micro_batches = self.micro_batches(trained)
        self.optimizer.zero_grad(set_to_none=True)
        totals = TokenTotals(self.device)
        for micro in micro_batches:
            with seconds("forward_s"):
                loss = self.micro_loss(micro, total_tokens, totals)
            with seconds("backward_s"):
                loss.backward()
        with seconds("metrics_s"):
            metrics = totals.reduced()
        with seconds("optimizer_s"):
            lr = self.next_lr()
            grad_norm = self.clip_gradients() if micro_batches else 0.0
            updated = bool(micro_batches) and math.isfinite(grad_norm) and math.isfinite(metrics["loss"])
            if updated:
                self.update(lr)
        self.step_count += 1
        rewards = torch.tensor([sample.reward for sample in batch.samples], dtype=torch.float64)
        return {
            **metrics,
            "reward": rewards.mean().item() if len(rewards) else 0.0,
            "grad_norm": grad_norm,
            "lr": lr,
            "samples": float(len(rewards)),
            "tokens": float(total_tokens),
            "groups": float(len(batch.groups)),
            "zero_spread_groups": float(zero_spread),
            "micro_batches": float(len(micro_batches)),
            "optimizer_steps": float(self.optimizer_steps),
            "update_skipped": float(not updated),
            **seconds.spent,
        }

    def micro_batches(self, trained: list[tuple[TrainSample, float]]) -> list[MicroBatch]:
        """This rank's micro-batches; every rank has the same number."""
        lengths = [input_tokens(sample) for sample, _ in trained]
        mine = [side_by_side[dist.get_rank()] for side_by_side in self.plan(lengths)]
        return [
            pack([trained[i][0] for i in indices], [trained[i][1] for i in indices], self.device) for indices in mine
        ]

    def plan(self, lengths: list[int]) -> list[list[list[int]]]:
        return plan(lengths, dist.get_world_size(), self.config.learner.microbatch_tokens)

    def micro_loss(self, micro: MicroBatch, total_tokens: int, totals: "TokenTotals") -> Tensor:
        section = self.config.learner
        logprobs, entropies = self.policy(micro)
        token_losses, clipped = losses.clipped_policy_loss(
            logprobs, micro.behaviour_logprobs, micro.advantages, section.clip_low, section.clip_high
        )
        loss = losses.token_mean(token_losses, total_tokens)
        if not micro.is_dummy:
            totals.add(loss.detach(), logprobs.detach(), micro.behaviour_logprobs, entropies, clipped)
        return loss

    def clip_gradients(self) -> float:
        """Scale gradients to a global norm of at most `learner.grad_clip`; the norm before that."""
        gradients = [p.grad.to_local() for p in self.policy.parameters() if p.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients).double().square()
        dist.all_reduce(square)
        norm = square.sqrt().item()
        if norm > self.config.learner.grad_clip and math.isfinite(norm):
            torch._foreach_mul_(gradients, self.config.learner.grad_clip / norm)
        return norm

    def next_lr(self) -> float:
        """Linear from 0 over the first `learner.warmup_steps` optimizer steps, then constant."""
        section = self.config.learner
        return section.lr * min(1.0, (self.optimizer_steps + 1) / max(1, section.warmup_steps))

    def update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer_steps += 1

    def weights(self) -> dict[str, Tensor]:
        """All weights as workers generate with them, on the CPU of rank 0; {} elsewhere."""
        return full_state(self.policy, None if self.device.type == "cpu" else torch.bfloat16)

    def restore(self) -> int:
        """Go on from the latest complete checkpoint, if there is one; the step of the weights now held."""
        step = checkpoint.shared_latest(self.directory)
        if step is not None:
            self.optimizer_steps = checkpoint.restore(self.directory, step, self.policy, self.optimizer)
            self.step_count = step
        return self.step_count

    def save(self) -> None:
        """Write the checkpoint of `step_count` and remove the oldest beyond `learner.keep_checkpoints`."""
        checkpoint.save(self.directory, self.step_count, self.policy, self.optimizer, self.optimizer_steps)
        checkpoint.prune(self.directory, self.config.learner.keep_checkpoints)

    @property
    def oldest_checkpoint(self) -> int:
        """Step of the oldest checkpoint that is kept; 0, the starting weights, until one had to be removed."""
        kept = checkpoint.steps(self.directory)
        return kept[0] if len(kept) >= self.config.learner.keep_checkpoints else 0

    def export(self) -> None:
        """Write the policy as a Hugging Face folder, `checkpoints/policy`."""
        checkpoint.export(self.policy, self.config.model.path, self.directory / "policy")


def trained_samples(batch: Batch) -> tuple[list[tuple[TrainSample, float]], int]:
    """Samples that have a gradient, each with its advantage; and the number of groups without reward spread."""
    trained, zero_spread = [], 0
    for group in batch.groups:
        advantages = losses.group_advantages(torch.tensor([sample.reward for sample in group])).tolist()
        zero_spread += not any(advantages)
        trained += [
            (sample, advantage)
            for sample, advantage in zip(group, advantages, strict=True)
            if advantage and sample.response_tokens
        ]
    return trained, zero_spread


class TokenTotals:
    """Sums over the trained tokens of this rank, reduced over ranks once a step."""

    NAMES = ("loss", "trained_tokens", "entropy", "kl", "clip_fraction", "ratio_mean")

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(len(self.NAMES), dtype=torch.float64, device=device)
        self.ratio_max = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, loss: Tensor, logprobs: Tensor, behaviour: Tensor, entropies: Tensor, clipped: Tensor) -> None:
        ratio = losses.probability_ratio(logprobs, behaviour)
        kl = losses.kl_k3(logprobs, behaviour)
        columns = (loss, torch.ones_like(ratio), entropies, kl, clipped, ratio)
        self.sums += torch.stack([column.double().sum() for column in columns])
        self.ratio_max = torch.maximum(self.ratio_max, ratio.max().double())

    def reduced(self) -> dict[str, float]:
        """`loss`, `trained_tokens`, and the means over them of the rest, over all ranks."""
        dist.all_reduce(self.sums)
        dist.all_reduce(self.ratio_max, dist.ReduceOp.MAX)
        loss, tokens, *sums = self.sums.tolist()
        result = {"loss": loss, "trained_tokens": tokens}
        if tokens:
            result.update({name: value / tokens for name, value in zip(self.NAMES[2:], sums, strict=True)})
            result["ratio_max"] = self.ratio_max.item()
        return result


class PhaseSeconds:
    """Wall-clock seconds by phase; waits for the accelerator at each phase's end."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spent = {}

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.spent[phase] = self.spent.get(phase, 0.0) + time.perf_counter() - start
