"""One optimizer step a batch: advantages, plan, packed forward and backward passes, clipping, AdamW.

The same batch, checkpoint and number of ranks give bitwise the same weights on CPU.
"""

import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from april.config import Config, LearnerSection
from april.learner import checkpoint, flops, lora
from april.learner.batch import Batch, TrainSample
from april.learner.diagnostics import TokenTotals
from april.learner.engine_gaps import EngineGaps
from april.learner.model import full_state, load_sharded, outline
from april.learner.objective import Objective, OfBatch, Prepared, ResponseTokens
from april.learner.packing import MicroBatch, input_tokens, pack, plan
from april.learner.seen import SeenTokens, keeps
from april.processes.pulse import MAIN
from april.weights.canary import Canary, canary_tokens
from april.wire.version import Version


@dataclass(frozen=True, eq=False)
class ReadyBatch:
    """A batch as this rank trains it."""

    prepared: Prepared
    micro_batches: list[tuple[MicroBatch, ResponseTokens | None]]
    indices: list[list[int]]
    """of the prepared samples in each micro-batch"""
    operations: float
    """floating-point operations of the model's step, over all ranks"""
    seconds: float
    """that it took to make"""


class Trainer:
    """The sharded policy, its optimizer and how far they have come. Every method but `prepare` is collective.

    `step_count` is the number of batches consumed, the step of the policy version that the weights are now;
    `optimizer_steps` leaves out the batches that changed nothing.
    """

    def __init__(self, config: Config, device: torch.device):
        """Load `config.model.path` onto every rank of the default process group and shard it."""
        self.config = config
        self.device = device
        self.directory = config.run_dir / "checkpoints"
        self.objective = Objective(config)
        section = config.learner
        policy = outline(config.model.path, config.sampling.temperature, section.activation_checkpointing)
        if config.lora.is_set:
            lora.attach(policy.lm, config.lora, config.seed)
        self.adapter = lora.describe(policy.lm, config.lora)
        self.cost = flops.cost(policy.lm)
        self.peak_tflops = section.peak_tflops or flops.peak_tflops(device)
        self.policy = load_sharded(policy, config.model.path, device, uses_bf16(section, device))
        self.reference = self.load_reference() if self.objective.needs_reference else None
        self.optimizer = torch.optim.AdamW(
            [parameter for _, parameter in self.policy.trained],
            lr=config.learner.lr,
            betas=config.learner.betas,
            weight_decay=config.learner.weight_decay,
            fused=True,
        )
        self.checkpoints = checkpoint.Writer(self.directory, section.keep_checkpoints, section.collective_timeout_s)
        self.step_count = 0
        self.optimizer_steps = 0
        self.seen: SeenTokens | None = None
        """how the last step has seen its tokens, where its samples are kept"""

    def load_reference(self) -> nn.Module:
        """The starting policy: the one at hand without its adapter, or else once more, sharded, never updated."""
        if self.config.lora.is_set:
            return lora.WithoutAdapter(self.policy)
        path, bf16 = self.config.model.path, uses_bf16(self.config.learner, self.device)
        policy = outline(path, self.config.sampling.temperature).requires_grad_(False)
        return load_sharded(policy, path, self.device, bf16, trained=False)

    def prepare(self, batch: Batch) -> "ReadyBatch":
        """Advantages, plan and this rank's micro-batches on its device; may run beside `step`, without other ranks."""
        began = time.perf_counter()
        prepared = self.objective.prepare(batch)
        costs = [self.cost.of(input_tokens(sample), sample.sampled_tokens) for sample in prepared.samples]
        indices = self.planned(prepared, costs)
        micro_batches = self.micro_batches(prepared, indices)
        passes = flops.ADAPTER_PASSES if self.config.lora.is_set else flops.PASSES
        passes += (self.reference is not None) + self.objective.needs_batch
        return ReadyBatch(prepared, micro_batches, indices, passes * sum(costs), time.perf_counter() - began)

    def step(self, batch: Batch, ready: "ReadyBatch | None" = None) -> dict[str, float]:
        """Train on `batch`, which `ready` was made from, and return metrics, equal on all ranks but for speeds.

        Samples without a gradient are not computed, though their tokens count in the loss's normalisation; figures
        of tokens are over the `trained_tokens` that were, and absent when there were none. Then, or when loss or
        gradient are not finite (`nonfinite` 1), the weights stay as they are (`update_skipped` 1) and the batch
        counts as consumed.
        """
        ready = ready or self.prepare(batch)
        micro_batches, began = ready.micro_batches, time.perf_counter()
        seconds = PhaseSeconds(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        totals, gaps = TokenTotals(self.device), EngineGaps(ready.prepared.samples, self.device)
        kept = keeps(self.config.samples, batch)
        self.seen = seen = SeenTokens(ready.prepared.samples, self.device) if kept else None

        def see(indices: list[int], logprobs: Tensor, entropies: Tensor, tokens: ResponseTokens) -> None:
            gaps.add(indices, logprobs, tokens.behaviour_logprobs, tokens.ages)
            if seen:
                seen.add(indices, logprobs, entropies)

        with seconds("forward_s"):
            of_batch = self.of_batch(micro_batches)
        for (micro, tokens), indices, given in zip(micro_batches, ready.indices, of_batch, strict=True):
            MAIN.at("forward and backward")
            with seconds("forward_s"):
                loss = self.micro_loss(micro, tokens, totals, partial(see, indices), given)
            with seconds("backward_s"):
                loss.backward()
        MAIN.at("updating the weights")
        with seconds("metrics_s"):
            metrics = totals.reduced() | gaps.reduced()
            if seen:
                seen.reduce()
        with seconds("optimizer_s"):
            lr = self.next_lr() * self.objective.step_scale(metrics)
            grad_norm = self.clip_gradients() if micro_batches else 0.0
            finite = math.isfinite(grad_norm) and math.isfinite(metrics["loss"])
            updated = bool(micro_batches) and finite
            if updated:
                self.update(lr)
        self.step_count += 1
        return {
            **metrics,
            **ready.prepared.metrics,
            "grad_norm": grad_norm,
            "lr": lr,
            "micro_batches": float(len(micro_batches)),
            "optimizer_steps": float(self.optimizer_steps),
            "update_skipped": float(not updated),
            "nonfinite": float(not finite),
            "prepare_s": ready.seconds,
            **self.speed(ready.operations, time.perf_counter() - began),
            **seconds.spent,
        }

    def speed(self, operations: float, seconds: float) -> dict[str, float]:
        """What the model's operations come to on each rank, and their share of the device's peak, if that is known."""
        reached = operations / dist.get_world_size() / seconds / 1e12
        return {"tflop_per_s": reached} | ({"mfu": reached / self.peak_tflops} if self.peak_tflops else {})

    def planned(self, prepared: Prepared, costs: list[float]) -> list[list[int]]:
        """The samples of this rank's micro-batches; of as many on every rank."""
        lengths = [input_tokens(sample) for sample in prepared.samples]
        planned = plan(lengths, dist.get_world_size(), self.config.learner.microbatch_tokens, costs)
        return [side_by_side[dist.get_rank()] for side_by_side in planned]

    def micro_batches(
        self, prepared: Prepared, planned: list[list[int]]
    ) -> list[tuple[MicroBatch, ResponseTokens | None]]:
        """Those of the `planned` samples, with what the loss needs of them (None for a dummy)."""
        return [
            (
                pack([prepared.samples[i] for i in indices], self.device),
                self.objective.tokens(prepared, indices, self.device) if indices else None,
            )
            for indices in planned
        ]

    def micro_loss(
        self,
        micro: MicroBatch,
        tokens: ResponseTokens | None,
        totals: TokenTotals,
        see: Callable[[Tensor, Tensor, ResponseTokens], None],
        of_batch: OfBatch | None,
    ) -> Tensor:
        """This micro-batch's share of the loss; a dummy takes part in the collectives and weighs nothing. `see` is
        shown log-probabilities and entropies of the tokens, and what was known of them before."""
        reference_logprobs = None
        if self.reference is not None:
            with torch.no_grad():
                reference_logprobs, _ = self.reference(micro)
        logprobs, entropies = self.policy(micro)
        if tokens is None:
            return 0.0 * logprobs.sum()
        see(logprobs, entropies, tokens)
        return self.objective.loss(logprobs, entropies, tokens, totals, reference_logprobs, of_batch)

    def of_batch(self, micro_batches: list[tuple[MicroBatch, ResponseTokens | None]]) -> list[OfBatch | None]:
        """For each micro-batch, what its loss takes from all tokens of the batch: a forward pass of all of them, where
        the algorithm has a part that looks at those."""
        if not self.objective.needs_batch:
            return [None] * len(micro_batches)
        scored: list[tuple[ResponseTokens, Tensor]] = []
        for micro, tokens in micro_batches:
            MAIN.at("scoring the batch")
            with torch.no_grad():
                logprobs, _ = self.policy(micro)
            if tokens is not None:
                scored.append((tokens, logprobs))
        found = iter(self.objective.of_batch(scored, self.device))
        return [None if tokens is None else next(found) for _, tokens in micro_batches]

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

    def canary(self) -> Canary:
        """What these weights say of the canary, as a step would compute it."""
        config, embedding = self.config, self.policy.lm.get_input_embeddings()
        longest = config.longest_prompt_tokens + config.sampling.max_response_tokens
        tokens = canary_tokens(embedding.num_embeddings, longest - 1)
        scored = len(tokens) - 1
        text = TrainSample(tokens, 1, np.zeros(scored, np.float32), 0.0, ((0, scored, Version(0, 0)),))
        self.policy.eval()
        with torch.no_grad():
            logprobs, _ = self.policy(pack([text], self.device), temperature=1.0)
        self.policy.train()
        self.policy.reshard()
        rounded = self.device.type != "cpu" or uses_bf16(self.config.learner, self.device)
        dtype = "bfloat16" if rounded else "float32"
        return Canary(tokens.tolist(), logprobs.tolist(), dtype)

    def restore(self) -> int:
        """Go on from the newest whole checkpoint, if there is one; the step of the weights now held."""
        step = checkpoint.shared_latest(self.directory)
        if step is not None:
            checkpoint.check_adapter(self.directory, step, self.adapter)
            self.optimizer_steps = checkpoint.restore(self.directory, step, self.policy, self.optimizer)
            self.step_count = step
        return self.step_count

    def start_save(self) -> None:
        """Copy the state and let the checkpoint of `step_count` be written while training goes on; a checkpoint that
        is still being written is waited for."""
        self.checkpoints.start(self.step_count, self.policy, self.optimizer, self.optimizer_steps, self.adapter)

    def saved(self, wait: bool = False) -> int | None:
        """Step of a checkpoint that has come to be on disk since the last call, and has been started by
        `start_save`; None without one. Raises what went wrong."""
        return self.checkpoints.completed(wait)

    def save(self) -> None:
        """Write the checkpoint of `step_count`; on return it is on disk."""
        self.start_save()
        self.saved(wait=True)
        dist.barrier()

    @property
    def oldest_checkpoint(self) -> int:
        """Step of the oldest checkpoint that is kept; 0, the starting weights, until one had to be removed."""
        kept = checkpoint.steps(self.directory)
        return kept[0] if len(kept) >= self.config.learner.keep_checkpoints else 0

    def export(self) -> None:
        """Write the policy as a Hugging Face folder, `checkpoints/policy`, and an adapter alone as well, into
        `checkpoints/adapter`; the others do not wait for rank 0."""
        checkpoint.export(self.policy, self.config.model.path, self.config.exported_policy)
        if self.config.lora.is_set:
            checkpoint.export_adapter(self.policy, self.adapter, self.config.model.path, self.config.exported_adapter)


def uses_bf16(section: LearnerSection, device: torch.device) -> bool:
    return section.compute == "bf16" or (section.compute == "auto" and device.type != "cpu")


class PhaseSeconds:
    """Wall-clock seconds by phase; waits for the accelerator at each phase's end."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spent: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.spent[phase] = self.spent.get(phase, 0.0) + time.perf_counter() - start
