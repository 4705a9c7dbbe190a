"""A batch's optimizer steps: advantages, plan, packed forward and backward passes, clipping, AdamW.

One, or `learner.epochs` times `learner.minibatches`. Then all tokens are scored under the weights before the first:
the proximal policy and the corrections are of those, and so is what is reported and kept of how the learner saw each
token. The same batch, checkpoint and number of ranks give bitwise the same weights on CPU.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from april.config import Config
from april.formats.stored import stored_checkpoints
from april.learner import checkpoint, flops
from april.learner.backends import BACKENDS
from april.learner.batch import Batch, TrainSample
from april.learner.critic import Critic
from april.learner.diagnostics import TokenTotals
from april.learner.engine_gaps import EngineGaps
from april.learner.losses.columns import bounded
from april.learner.losses.divergence import k1
from april.learner.micro import Measured, Micro
from april.learner.model import uses_bf16
from april.learner.objective import Objective, Prepared, ResponseTokens
from april.learner.packing import input_tokens, pack, plan
from april.learner.phases import PhaseSeconds, Seconds
from april.learner.seen import SeenTokens, keeps
from april.learner.store import Store
from april.processes.pulse import MAIN
from april.weights.base import Adapted
from april.weights.canary import Canary, canary_tokens
from april.wire.version import Version

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ReadyBatch:
    """A batch as this rank trains it."""

    prepared: Prepared
    minibatches: list[list[Micro]]
    """of each optimizer step of an epoch, as many on every rank; none where no sample has a gradient"""
    operations: float
    """floating-point operations of the model's step, over all ranks"""
    seconds: float
    """that it took to make"""

    @property
    def micros(self) -> list[Micro]:
        return [micro for minibatch in self.minibatches for micro in minibatch]

    def divided(self, micros: list[Micro]) -> list[list[Micro]]:
        """`micros`, of which more is known than of its own, in its minibatches."""
        rest = iter(micros)
        return [[next(rest) for _ in minibatch] for minibatch in self.minibatches]


@dataclass(frozen=True, eq=False)
class Update:
    """What came of an optimizer step."""

    totals: TokenTotals
    lr: float
    grad_norm: float
    updated: bool
    finite: bool
    nothing: bool
    """was changed, of the policy or of a critic"""
    of_critic: dict[str, float]
    """figures, if there is one"""


See = Callable[[list[int], Tensor, Tensor, ResponseTokens], None]
"""is shown the samples of a micro-batch, log-probabilities and entropies of their tokens, and what was known of them"""


class Trainer:
    """The sharded policy, its optimizer and how far they have come. Every method but `prepare` is collective.

    `step_count` is the number of batches consumed, the step of the policy version that the weights are now;
    `optimizer_steps` leaves out the batches that changed nothing.

    Where advantages ask for values there is a critic beside the policy. An optimizer step changes both or neither, but
    for the first `critic.warmup_batches`, which train the critic alone.
    """

    def __init__(self, config: Config, device: torch.device):
        """Load `config.model.path` over the ranks of the default process group, as `learner.backend` spreads it."""
        self.config = config
        self.device = device
        self.directory = config.run_dir / "checkpoints"
        section = config.learner
        entry = BACKENDS.find(section.backend)
        entry.check(config)
        self.backend = entry.build(config, device)
        self.policy, self.part, self.ranks = self.backend.policy, self.backend.part, self.backend.ranks
        self.objective = Objective(config, self.ranks)
        self.peak_tflops = section.peak_tflops or flops.peak_tflops(device)
        wants_reference = self.objective.needs_reference or self.objective.penalises_rewards
        self.reference = self.backend.reference() if wants_reference else None
        bf16, estimator = uses_bf16(section, device), self.objective.estimator
        self.critic = Critic(config, device, bf16, estimator) if self.objective.needs_values else None
        self.parts = [self.part] + ([self.critic.part] if self.critic else [])
        self.checkpoints = Store(
            self.directory, section.keep_checkpoints, section.collective_timeout_s, stored_checkpoints(config)
        )
        self.step_count = 0
        self.seen: SeenTokens | None = None
        """how the last step has seen its tokens, where its samples are kept"""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The policy's."""
        return self.part.optimizer

    @property
    def optimizer_steps(self) -> int:
        return self.part.steps

    def prepare(self, batch: Batch) -> "ReadyBatch":
        """Advantages, plan and this rank's micro-batches on its device; may run beside `step`, without other ranks."""
        began = time.perf_counter()
        prepared = self.objective.prepare(batch)
        costs = [self.backend.cost.of(input_tokens(sample), sample.sampled_tokens) for sample in prepared.samples]
        members: list[list[int]] = [[] for _ in range(1 + max(prepared.minibatches, default=0))]
        for i, number in enumerate(prepared.minibatches):
            members[number].append(i)
        minibatches = [self.micros(prepared, each, costs) for each in members]
        passes = flops.ADAPTER_PASSES if self.config.lora.is_set else flops.PASSES
        passes = self.config.learner.epochs * (passes + (self.reference is not None)) + self.objective.needs_batch
        if self.objective.needs_norms:
            passes += flops.ADAPTER_PASSES if self.config.lora.is_set else flops.PASSES
        operations = passes * sum(costs)
        if self.critic:
            bodies = [self.backend.cost.of(input_tokens(sample), 0) for sample in prepared.samples]
            operations += (1 + flops.PASSES * self.config.learner.epochs) * sum(bodies)
        return ReadyBatch(prepared, minibatches, operations, time.perf_counter() - began)

    def step(self, batch: Batch, ready: "ReadyBatch | None" = None) -> dict[str, float]:
        """Train on `batch`, which `ready` was made from, and return metrics, equal on all ranks but for speeds.

        Samples without a gradient are not computed, though their tokens count in the loss's normalisation; figures
        of tokens are over the `trained_tokens` that were, and absent when there were none. An optimizer step without
        any, or whose loss or gradient is not finite, leaves the weights as they are; `update_skipped` is the share of
        those. Where the weights are the same behind all of them and one was not finite, `nonfinite` is 1. The batch
        counts as consumed in any case.
        """
        ready = ready or self.prepare(batch)
        began, seconds = time.perf_counter(), PhaseSeconds(self.device)
        gaps = EngineGaps(ready.prepared.samples, self.device)
        kept = keeps(self.config.samples, batch.step)
        self.seen = seen = SeenTokens(ready.prepared.samples, self.device) if kept else None

        def see(indices: list[int], logprobs: Tensor, entropies: Tensor, tokens: ResponseTokens) -> None:
            gaps.add(indices, logprobs, tokens.behaviour_logprobs, tokens.ages)
            if seen:
                seen.add(indices, logprobs, entropies)

        micros, judged = ready.micros, dict[str, float]()
        if self.objective.needs_batch:
            with seconds("forward_s"):
                micros, see = self.score(micros, see), unseen
        if self.critic:
            with seconds("critic_s"):
                micros, judged = self.judge(self.critic, micros, ready.prepared)
        if self.objective.needs_norms:
            with seconds("norms_s"):
                micros = self.compare(micros, ready.prepared)
        if self.objective.needs_batch:
            micros = self.of_batch(micros)
        updates, minibatches = [], ready.divided(micros)
        for epoch in range(self.config.learner.epochs):
            updates += [self.optimize(each, unseen if epoch else see, seconds) for each in minibatches]
        with seconds("metrics_s"):
            metrics = TokenTotals.over([each.totals for each in updates], self.config.learner.epochs).figures()
            metrics |= gaps.reduced(self.ranks)
            if seen:
                seen.reduce(self.ranks)
        self.step_count += 1
        metrics |= judged | {name: fmean(each.of_critic[name] for each in updates) for name in updates[0].of_critic}
        updated, finite = [each.updated for each in updates], [each.finite for each in updates]
        if not all(finite):
            log.warning("%d of %d optimizer steps were not finite", finite.count(False), len(updates))
        return {
            **metrics,
            **ready.prepared.metrics,
            "grad_norm": fmean(each.grad_norm for each in updates),
            "lr": updates[-1].lr,
            "micro_batches": float(len(ready.micros)),
            "optimizer_steps": float(self.optimizer_steps),
            "update_skipped": updated.count(False) / len(updates),
            "nonfinite": float(all(each.nothing for each in updates) and not all(finite)),
            "prepare_s": ready.seconds,
            **self.speed(ready.operations, time.perf_counter() - began),
            **seconds.spent,
        }

    def optimize(self, micros: list[Micro], see: See, seconds: Seconds) -> Update:
        """One optimizer step. Collective."""
        for part in self.parts:
            part.optimizer.zero_grad(set_to_none=True)
        totals, warms_up = TokenTotals(self.device), self.warms_up
        if self.objective.needs_reference:
            with seconds("forward_s"):
                micros = self.with_reference(micros)

        def loss(place: int, logprobs: Tensor, entropies: Tensor) -> Tensor:
            return self.micro_loss(micros[place], logprobs, entropies, totals, see)

        MAIN.at("forward and backward")
        if warms_up:
            with seconds("forward_s"):
                for place, found in enumerate(self.scores(self.policy, micros)):
                    loss(place, *found)
            self.backend.rest()
        else:
            self.backend.backward([micro.packed for micro in micros], loss, seconds)
        if self.critic:
            with seconds("critic_s"):
                for micro in micros:
                    MAIN.at("the critic's forward and backward")
                    self.critic.backward(micro.packed, micro.tokens, micro.judged)
        MAIN.at("updating the weights")
        with seconds("metrics_s"):
            figures = totals.reduced(self.ranks).figures()
        with seconds("optimizer_s"):
            lr = self.next_lr() * self.objective.step_scale(figures)
            grad_norm = self.backend.clip(self.config.learner.grad_clip) if micros and not warms_up else 0.0
            of_critic = self.critic.reduced() if self.critic else {}
            finite = all(map(math.isfinite, (grad_norm, figures["loss"], *of_critic.values())))
            changes = bool(micros) and finite
            if changes and not warms_up:
                self.update(lr)
            if changes and self.critic:
                self.critic.update()
        return Update(totals, lr, grad_norm, changes and not warms_up, finite, not changes, of_critic)

    @property
    def warms_up(self) -> bool:
        """The critic learns alone."""
        return self.critic is not None and self.step_count < self.config.critic.warmup_batches

    def speed(self, operations: float, seconds: float) -> dict[str, float]:
        """What the model's operations come to on each rank, and their share of the device's peak, if that is known."""
        reached = operations / dist.get_world_size() / seconds / 1e12
        return {"tflop_per_s": reached} | ({"mfu": reached / self.peak_tflops} if self.peak_tflops else {})

    def micros(self, prepared: Prepared, members: list[int], costs: list[float]) -> list[Micro]:
        """This rank's micro-batches of the minibatch that has the samples `members`; of as many at every place."""
        lengths = [input_tokens(prepared.samples[i]) for i in members]
        budget = self.config.learner.microbatch_tokens
        planned = plan(lengths, self.ranks.count, budget, [costs[i] for i in members])
        found = []
        for side_by_side in planned:
            indices = [members[i] for i in side_by_side[self.ranks.place]]
            packed = pack([prepared.samples[i] for i in indices], self.device)
            tokens = self.objective.tokens(prepared, indices, self.device) if indices else None
            found.append(Micro(indices, packed, tokens))
        return found

    def micro_loss(self, micro: Micro, logprobs: Tensor, entropies: Tensor, totals: TokenTotals, see: See) -> Tensor:
        """This micro-batch's share of the loss; a dummy takes part in the collectives and weighs nothing."""
        if micro.tokens is None:
            return 0.0 * logprobs.sum()
        see(micro.indices, logprobs, entropies, micro.tokens)
        return self.objective.loss(logprobs, entropies, micro.tokens, totals, micro.reference, micro.given)

    def scores(self, model: nn.Module | None, micros: list[Micro]) -> Iterator[tuple[Tensor, Tensor]]:
        """By the policy or the reference. Collective."""
        assert model is not None
        return self.backend.scores(model, [micro.packed for micro in micros])

    def with_reference(self, micros: list[Micro]) -> list[Micro]:
        """With the log-probabilities of the reference. Collective."""
        MAIN.at("scoring by the reference")
        found = self.scores(self.reference, micros)
        return [replace(micro, reference=logprobs) for micro, (logprobs, _) in zip(micros, found, strict=True)]

    def score(self, micros: list[Micro], see: See) -> list[Micro]:
        """With the log-probabilities under the weights at hand. Collective."""
        MAIN.at("scoring the batch")
        scored = []
        for micro, (logprobs, entropies) in zip(micros, self.scores(self.policy, micros), strict=True):
            if micro.tokens is not None:
                see(micro.indices, logprobs, entropies, micro.tokens)
            scored.append(replace(micro, before=logprobs))
        return scored

    def judge(self, critic: Critic, micros: list[Micro], prepared: Prepared) -> tuple[list[Micro], dict[str, float]]:
        """With the advantages that the critic gives to each token, and figures about them; their means are noted in
        `prepared`. Collective."""
        values = []
        for micro in micros:
            MAIN.at("judging the batch")
            values.append(critic.values(micro.packed))
        penalties = self.penalties(micros)
        tokens = [micro.tokens for micro in micros]
        judgements, figures = critic.judge(tokens, values, penalties)
        means = torch.zeros(len(prepared.samples), dtype=torch.float64, device=self.device)
        judged = []
        for micro, judgement in zip(micros, judgements, strict=True):
            if micro.tokens is not None and judgement is not None:
                spans = micro.tokens.spans
                means[micro.indices] = (spans.totals(judgement.advantages) / spans.lengths).double()
                known = replace(micro.tokens, advantages=judgement.advantages)
                micro = replace(micro, tokens=known, judged=judgement)
            judged.append(micro)
        prepared.of_batch[prepared.places] = self.ranks.total(means).cpu().numpy()
        return judged, figures

    def compare(self, micros: list[Micro], prepared: Prepared) -> list[Micro]:
        """With the advantages that go by the gradient of each response, noted in `prepared`. Collective.

        A backward pass adds up what it is of, over all ranks: each response has one of its own, its rows side by side.
        """
        lengths = [float(input_tokens(sample)) for sample in prepared.samples]
        sessions = [rows for group in prepared.compared for rows in group]
        log_ratios, squares = torch.zeros(2, len(sessions), dtype=torch.float64, device=self.device)
        MAIN.at("measuring the responses")
        for place, rows in enumerate(sessions):
            self.optimizer.zero_grad(set_to_none=True)
            passes = self.micros(prepared, rows, lengths)
            self.backend.backward([micro.packed for micro in passes], Measured(passes, log_ratios[place]))
            squares[place] = self.backend.clip(math.inf) ** 2 if passes else 0.0
        self.objective.compare(prepared, bounded(self.ranks.total(log_ratios)).cpu(), squares.cpu())

        def known(micro: Micro) -> Micro:
            return replace(micro, tokens=self.objective.tokens(prepared, micro.indices, self.device))

        return [micro if micro.tokens is None else known(micro) for micro in micros]

    def penalties(self, micros: list[Micro]) -> list[Tensor | None]:
        """What is taken from the reward of each token of each micro-batch, [K], if anything is. Collective."""
        if not self.objective.penalises_rewards:
            return [None] * len(micros)
        coef, found = self.config.critic.kl_coef, self.with_reference(micros)
        return [coef * k1(micro.before, micro.reference) for micro in found]

    def of_batch(self, micros: list[Micro]) -> list[Micro]:
        """With what the loss takes from all tokens of the batch. Collective."""
        scored = [(micro.tokens, micro.before) for micro in micros if micro.tokens is not None]
        found = iter(self.objective.of_batch(scored, self.device))
        return [micro if micro.tokens is None else replace(micro, given=next(found)) for micro in micros]

    def next_lr(self) -> float:
        """Linear from 0 over the first `learner.warmup_steps` optimizer steps, then constant."""
        section = self.config.learner
        return section.lr * min(1.0, (self.optimizer_steps + 1) / max(1, section.warmup_steps))

    def update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.part.steps += 1

    def weights(self) -> dict[str, Tensor]:
        """All weights as workers generate with them, on the CPU of rank 0; {} elsewhere."""
        return self.backend.weights(self.workers_dtype)

    def published(self) -> Mapping[str, Tensor] | Adapted:
        """What workers are sent, from which they have these; {} but on rank 0."""
        return self.backend.published(self.workers_dtype)

    @property
    def workers_dtype(self) -> torch.dtype | None:
        """Of the weights that workers generate with; None: as they are trained."""
        return None if self.device.type == "cpu" else torch.bfloat16

    def canary(self) -> Canary:
        """What these weights say of the canary, as a step would compute it."""
        config, embedding = self.config, self.backend.lm.get_input_embeddings()
        longest = config.longest_prompt_tokens + config.sampling.max_response_tokens
        tokens = canary_tokens(embedding.num_embeddings, longest - 1)
        scored = len(tokens) - 1
        text = TrainSample(tokens, 1, np.zeros(scored, np.float32), 0.0, ((0, scored, Version(0, 0)),))
        self.policy.eval()
        ((logprobs, _),) = self.backend.scores(self.policy, [pack([text], self.device)], temperature=1.0)
        self.policy.train()
        self.backend.rest()
        dtype = self.backend.computes_in if self.device.type == "cpu" else "bfloat16"
        return Canary(tokens.tolist(), logprobs.tolist(), dtype)

    def restore(self) -> int:
        """Go on from the newest whole checkpoint, if there is one; the step of the weights now held."""
        if found := self.checkpoints.newest():
            checkpoint.check_adapter(self.directory, found.step, self.backend.adapter)
            checkpoint.check_critic(self.directory, found.step, self.parts)
            self.checkpoints.restore(found, self.parts)
            self.step_count = found.step
        return self.step_count

    def held(self) -> Iterator[Tensor]:
        """What this rank keeps on its device between two batches, whose gradients go."""
        for part in self.parts:
            part.optimizer.zero_grad(set_to_none=True)
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
        self.backend.rest()
        for model in filter(None, (*(part.model for part in self.parts), self.reference)):
            yield from model.parameters()
            yield from model.buffers()

    def start_save(self) -> None:
        """Copy the state and let the checkpoint of `step_count` be written while training goes on; a checkpoint that
        is still being written is waited for."""
        self.checkpoints.start(self.step_count, self.parts, self.backend.adapter)

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
        """Step of the oldest checkpoint that a learner goes on from; 0, the starting weights, until one had to be
        removed."""
        newest = checkpoint.steps(self.directory)[-self.config.learner.keep_checkpoints :]
        return newest[0] if len(newest) >= self.config.learner.keep_checkpoints else 0

    def export_best(self, step: int) -> None:
        """Write the policy of checkpoint `step` as a Hugging Face folder, `checkpoints/best`, and keep that checkpoint
        alone beside the newest. It is the policy at hand then. Steps below 1 have none. Collective."""
        found = self.checkpoints.find(step) if step > 0 else None
        if step > 0 and found is None:
            log.error("the best weights are of step %d, whose checkpoint is not whole; they are not exported", step)
            return
        self.checkpoints.prune({step})
        if found:
            self.checkpoints.restore(found, [self.part])
            self.write_model(self.config.exported_best)
            self._copy(self.config.exported_best)

    def export(self) -> None:
        """Write the policy as a Hugging Face folder, `checkpoints/policy`, and an adapter alone as well, into
        `checkpoints/adapter`; the others do not wait for rank 0."""
        self.write_model(self.config.exported_policy)
        self._copy(self.config.exported_policy)
        if self.config.lora.is_set:
            path, adapter = self.config.model.path, self.backend.adapter
            checkpoint.export_adapter(self.policy, adapter, path, self.config.exported_adapter)
            self._copy(self.config.exported_adapter)

    def _copy(self, exported: Path) -> None:
        """To where checkpoints have their copies, if that takes more than them; the others do not wait for rank 0."""
        if dist.get_rank() == 0:
            self.checkpoints.copies.export(exported)

    def write_model(self, out_dir: Path) -> None:
        """The weights at hand as a Hugging Face folder, in the type of the one they began as. Collective."""
        source = self.config.model.path
        state = self.backend.weights(checkpoint.type_of_files(source))
        checkpoint.export(self.backend.lm, state, source, out_dir)


def unseen(indices: list[int], logprobs: Tensor, entropies: Tensor, tokens: ResponseTokens) -> None:
    """A `See` of what has been shown before."""
