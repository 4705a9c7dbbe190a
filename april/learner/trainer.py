"""A batch's optimizer steps: advantages, plan, packed forward and backward passes, clipping, AdamW.

A batch has `learner.epochs` times `learner.minibatches` optimizer steps. With more than one, all tokens are first
scored under the weights before the first step; the proximal policy, the corrections and the recorded log-probabilities
come from that pass. The same batch, checkpoint and number of ranks give bitwise the same weights on a CPU.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from april.config import Config
from april.config.stored import stored_checkpoints
from april.learner import checkpoint, exports, performance
from april.learner.algorithms import Algorithms, ReadyBatch
from april.learner.backends import BACKENDS
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.canary import CanaryScorer
from april.learner.conversations import ConversationLoss, ConversationMicroBatch
from april.learner.critic import Critic
from april.learner.diagnostics import StepTotals
from april.learner.gradient_norms import response_norms
from april.learner.head_divergence import TopKDivergence
from april.learner.model import uses_bf16
from april.learner.objective import (
    Objective,
    Prepared,
    ResponseTokens,
    ScoringPass,
    TrainMicroBatch,
)
from april.learner.optimizers import lr_share
from april.learner.optimizers.base import PartOptimizer
from april.learner.packing import MicroBatch, input_tokens, longest_input, pack, plan
from april.learner.performance import PhaseSeconds, Seconds
from april.learner.store import CheckpointStore
from april.learner.teacher import Teacher
from april.learner.token_stats import EngineGaps, TokenStats, keeps_samples
from april.util.pulse import MAIN
from april.weights.base import AdapterWeights
from april.weights.canary import Canary

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StepResult:
    """Result of one optimizer step."""

    totals: StepTotals
    lr: float
    grad_norm: float
    updated: bool
    finite: bool
    unchanged: bool
    """Whether neither policy nor critic was updated."""
    critic_metrics: dict[str, float]
    """Metrics of the critic; empty without a critic."""


TokenObserver = Callable[[list[int], Tensor, Tensor, ResponseTokens], None]
"""Callback (sample indices, log-probabilities [K], entropies [K], the tokens' `ResponseTokens`) that records how the
learner scored the K tokens of a micro-batch."""
Scorer = Callable[[Sequence[MicroBatch]], Iterator[tuple[Tensor, ...]]]
"""Function (micro-batches) -> for each, columns [K] such as a model's log-probabilities of its K tokens. Collective."""


class Trainer:
    """The sharded policy, its optimizer, and their progress. Every method but `prepare` is collective.

    `step_count` is the number of batches consumed, which is the policy step of the current weights; `optimizer_steps`
    counts only optimizer steps that changed the weights.

    Where the advantage needs values, a critic is trained with the policy. An optimizer step updates both or neither;
    only the first `critic.warmup_batches` train the critic alone.
    """

    def __init__(self, config: Config, device: torch.device):
        """Load `config.model.path`, sharded by `learner.backend` over the ranks of the default process group."""
        self.config = config
        self.device = device
        self.directory = config.run_dir / "checkpoints"
        section = config.learner
        entry = BACKENDS.find(section.backend)
        entry.check(config)
        self.backend = entry.build(config, device)
        self.policy, self.part, self.ranks = self.backend.policy, self.backend.part, self.backend.ranks
        self.algorithms = Algorithms(config, self.ranks)
        self.conversations = ConversationLoss(config, self.ranks, device)
        self.peak_tflops = section.peak_tflops or performance.peak_tflops(device)
        self.scorers: dict[str, Scorer] = {"policy": partial(self.backend.scores, self.policy)}
        """`ScoringPass.model` ("policy", "reference" or "critic") -> function that scores micro-batches by it."""
        models = {scoring.model for scoring in self.algorithms.passes}
        self.reference = self.backend.reference() if "reference" in models else None
        if self.reference:
            self.scorers["reference"] = partial(self.backend.scores, self.reference)
        self.teacher = Teacher.of(config, self.backend)
        bf16, valued = uses_bf16(section, device), [each for each in self.algorithms.used if each.needs_values]
        self.critic = Critic(config, device, bf16, valued[0], self.backend) if "critic" in models else None
        if self.critic:
            self.scorers["critic"] = self.critic.scores
        self.parts = [self.part] + ([self.critic.part] if self.critic else [])
        self.checkpoints = CheckpointStore(
            self.directory, section.keep_checkpoints, section.collective_timeout_s, stored_checkpoints(config)
        )
        self.step_count = 0
        self.token_stats: TokenStats | None = None
        """Log-probabilities and entropies of the last step's tokens; None if the step's samples are not stored."""
        self.canaries = CanaryScorer(config, self.backend, device)

    @property
    def optimizer(self) -> PartOptimizer:
        return self.part.optimizer

    @property
    def optimizer_steps(self) -> int:
        return self.part.steps

    def prepare(self, batch: TrainingBatch) -> ReadyBatch:
        """Compute advantages, plan and this rank's micro-batches, on its device. Not collective; may run in a thread
        while `step` runs."""
        began = time.perf_counter()
        prepared = self.algorithms.prepare(batch)
        numbers = zip(prepared.samples, prepared.objectives, strict=True)
        costs = [self.operations(sample, self.algorithms.objectives[number]) for sample, number in numbers]
        members: list[list[int]] = [[] for _ in range(1 + max(prepared.minibatches, default=0))]
        for i, number in enumerate(prepared.minibatches):
            members[number].append(i)
        minibatches = [self.build_micros(prepared, each, costs) for each in members]
        passes = self.passes_with_gradient * self.config.learner.epochs
        rows = [passes * self.backend.cost.of(input_tokens(row), row.sampled_tokens) for row in batch.conversations]
        conversations = self.conversations.micros(batch.conversations, len(minibatches), rows)
        return ReadyBatch(prepared, minibatches, conversations, sum(costs) + sum(rows), time.perf_counter() - began)

    @property
    def passes_with_gradient(self) -> int:
        """Cost of a forward plus a backward pass, in units of a forward pass."""
        return performance.ADAPTER_PASSES if self.config.lora.is_set else performance.PASSES

    def operations(self, sample: TrainSample, objective: Objective) -> float:
        """Floating-point operations of training on one sample, in all passes of all models."""
        length, epochs = input_tokens(sample), self.config.learner.epochs
        scored = sum(scoring.model != "critic" for scoring in objective.passes)
        passes = self.passes_with_gradient * (epochs + objective.needs_norms) + scored
        found = passes * self.backend.cost.of(length, sample.sampled_tokens)
        if sample.images and self.backend.images:
            if self.config.learner.freeze_vision:  # no backward pass
                passes = epochs + objective.needs_norms + scored
            found += passes * self.backend.cost.per_image_token * self.backend.images.tokens_of(sample)
        if self.teacher and objective.divergence:
            found += epochs * self.teacher.operations(sample)
        if self.critic:
            found += (1 + performance.PASSES * epochs) * self.backend.cost.of(length, 0)
        return found

    def step(self, batch: TrainingBatch, ready: ReadyBatch | None = None) -> dict[str, float]:
        """Train on `batch`, prepared as `ready`, and return metrics, which are equal on all ranks except for speeds.

        Samples without a gradient are not computed, but their tokens count in the normalisation of the loss. Token
        metrics are over the `trained_tokens`, and absent if there are none. An optimizer step without trained tokens,
        or with a loss or gradient that is not finite, leaves the weights unchanged; `update_skipped` is the share of
        such steps. `nonfinite` is 1 if no step changed the weights and at least one was not finite. The batch counts as
        consumed in any case.
        """
        ready = ready or self.prepare(batch)
        began, seconds = time.perf_counter(), PhaseSeconds(self.device)
        self.canaries.see(batch)
        gaps = EngineGaps(ready.prepared.samples, self.device)
        kept = keeps_samples(self.config.samples, batch.step)
        self.token_stats = token_stats = TokenStats(ready.prepared.samples, self.device) if kept else None

        def observe(indices: list[int], logprobs: Tensor, entropies: Tensor, tokens: ResponseTokens) -> None:
            gaps.add(indices, logprobs, tokens.behaviour_logprobs, tokens.ages)
            if token_stats:
                token_stats.add(indices, logprobs, entropies)

        micros, critic_metrics = ready.micros, dict[str, float]()
        for scoring in self.algorithms.passes:
            with seconds(scoring.phase):
                micros = self.with_scores(micros, scoring)
        if self.critic:
            with seconds("critic_s"):
                micros, critic_metrics = self.with_critic_advantages(self.critic, micros, ready.prepared)
        for objective in self.algorithms.objectives:
            if objective.needs_norms:
                with seconds("norms_s"):
                    micros = self.with_norm_advantages(objective, micros, ready.prepared)
            if objective.fixes_loss_inputs:
                micros = self.with_contexts(objective, micros, observe)
        results, minibatches = [], ready.split_by_minibatch(micros)
        for _ in range(self.config.learner.epochs):
            pairs = zip(minibatches, ready.conversations, strict=True)
            results += [self.optimize(minibatch, beside, observe, seconds) for minibatch, beside in pairs]
        with seconds("metrics_s"):
            metrics = StepTotals.combined([result.totals for result in results], self.config.learner.epochs).metrics()
            metrics |= gaps.reduced(self.ranks)
            if token_stats:
                token_stats.reduce(self.ranks)
        if not self.trains_critic_alone:
            rows = {"rows": len(batch.conversations), **batch.left_out}
            metrics |= {f"sft_{name}": float(count) for name, count in rows.items() if count}
        self.step_count += 1
        metrics |= critic_metrics | {
            name: fmean(result.critic_metrics[name] for result in results) for name in results[0].critic_metrics
        }
        updated, finite = [result.updated for result in results], [result.finite for result in results]
        if not all(finite):
            log.warning("%d of %d optimizer steps were not finite", finite.count(False), len(results))
        return {
            **metrics,
            **ready.prepared.metrics,
            "grad_norm": fmean(result.grad_norm for result in results),
            "lr": results[-1].lr,
            "micro_batches": float(len(ready.micros)),
            "optimizer_steps": float(self.optimizer_steps),
            "update_skipped": updated.count(False) / len(results),
            "nonfinite": float(all(result.unchanged for result in results) and not all(finite)),
            "prepare_s": ready.prepare_s,
            **self.throughput(ready.operations, time.perf_counter() - began),
            **seconds.spent,
        }

    def optimize(
        self,
        micros: list[TrainMicroBatch],
        conversations: list[ConversationMicroBatch],
        observe: TokenObserver,
        seconds: Seconds,
    ) -> StepResult:
        """Do one optimizer step of policy and critic on `micros`, and of the policy on `conversations`. Collective."""
        for part in self.parts:
            part.optimizer.zero_grad()
        sources = self.config.data.sources if self.config.data.sft_sources else []
        totals = StepTotals(self.device, len(self.algorithms.of_source), len(sources))
        critic_alone = self.trains_critic_alone
        conversations = [] if critic_alone else conversations

        def loss(index: int, *columns: Tensor) -> Tensor:
            if index < len(micros):
                return self.micro_loss(micros[index], columns, totals, observe)
            return self.conversations.loss(conversations[index - len(micros)], columns[0], totals)

        MAIN.at("forward and backward")
        packed = [
            TopKDivergence.added(micro.packed, micro.tokens and micro.tokens.teacher_top, micro.objective.divergence)
            for micro in micros
        ]
        packed += [micro.packed for micro in conversations]
        if critic_alone:
            with seconds("forward_s"):
                for index, scores in enumerate(self.backend.scores(self.policy, packed)):
                    loss(index, *scores)
            self.backend.free_gathered()
        else:
            divergences = [*(micro.objective.divergence for micro in micros), *(None for _ in conversations)]
            compared = zip(packed, divergences, strict=True)
            self.backend.backward(self.teacher.shown(compared, seconds) if self.teacher else packed, loss, seconds)
        if self.critic:
            with seconds("critic_s"):
                for micro in (each for each in micros if each.objective.needs_values):
                    MAIN.at("the critic's forward and backward")
                    self.critic.backward(micro.packed, micro.tokens)
        MAIN.at("updating the weights")
        with seconds("metrics_s"):
            metrics = totals.reduced(self.ranks).metrics()
        with seconds("optimizer_s"):
            lr = self.next_lr() * self.algorithms.objectives[0].step_scale(metrics)
            grad_norm = self.backend.clip(self.config.learner.grad_clip) if packed and not critic_alone else 0.0
            critic_metrics = self.critic.finish_step() if self.critic else {}
            finite = all(map(math.isfinite, (grad_norm, metrics["loss"], *critic_metrics.values())))
            changes = bool(packed) and finite
            if changes and not critic_alone:
                self.update(lr)
            if changes and self.critic:
                self.critic.update()
        return StepResult(totals, lr, grad_norm, changes and not critic_alone, finite, not changes, critic_metrics)

    @property
    def trains_critic_alone(self) -> bool:
        """Whether the batch of the current step is one of the `critic.warmup_batches`, which train no policy."""
        return self.critic is not None and self.step_count < self.config.critic.warmup_batches

    def throughput(self, operations: float, seconds: float) -> dict[str, float]:
        """Metrics of speed over `seconds`: TFLOP/s per rank and, if the device's peak is known, MFU (model FLOPs
        utilisation, 0 to 1). `operations`: of all ranks."""
        tflop_per_s = operations / dist.get_world_size() / seconds / 1e12
        return {"tflop_per_s": tflop_per_s} | ({"mfu": tflop_per_s / self.peak_tflops} if self.peak_tflops else {})

    def build_micros(self, prepared: Prepared, members: list[int], costs: list[float]) -> list[TrainMicroBatch]:
        """This rank's micro-batches of the minibatch whose prepared samples have the indices `members`; every rank has
        equally many, with the same objectives. `costs`: floating-point operations of each prepared sample."""
        micros = []
        images = self.backend.images if any(prepared.samples[i].images for i in members) else None
        budget = self.config.learner.microbatch_tokens * self.config.learner.context_parallel
        for number, objective in enumerate(self.algorithms.objectives):
            own = [i for i in members if prepared.objectives[i] == number]
            lengths = [longest_input(prepared.samples[i]) for i in own]
            for row in plan(lengths, self.ranks.count, budget, [costs[i] for i in own]):
                indices = [own[i] for i in row[self.ranks.rank]]
                packed = pack([prepared.samples[i] for i in indices], self.device, images)
                tokens = objective.tokens(prepared, indices, self.device) if indices else None
                micros.append(TrainMicroBatch(indices, packed, tokens, objective))
        return micros

    def micro_loss(
        self, micro: TrainMicroBatch, columns: tuple[Tensor, ...], totals: StepTotals, observe: TokenObserver
    ) -> Tensor:
        """Contribution of a micro-batch to the loss of the global batch, from `columns` of the policy's pass (first
        log-probabilities and entropies); 0 of a dummy one. `totals`: sums for the step's metrics, added to here."""
        logprobs, entropies, *divergences = columns
        if micro.tokens is None:
            return 0.0 * logprobs.sum()
        if micro.context is None:  # otherwise the pass over the whole batch has recorded them
            observe(micro.indices, logprobs, entropies, micro.tokens)
        return micro.objective.loss(logprobs, entropies, micro.tokens, totals, micro.context, *divergences)

    def with_scores(self, micros: list[TrainMicroBatch], scoring: ScoringPass) -> list[TrainMicroBatch]:
        """Copies of `micros` with the columns of a scoring pass, where their objective needs it. Collective."""
        MAIN.at(scoring.activity)
        needed = [micro.packed for micro in micros if scoring in micro.objective.passes]
        columns, scored = iter(self.scorers[scoring.model](needed)), []
        for micro in micros:
            found = next(columns) if scoring in micro.objective.passes else ()
            if micro.tokens is not None:
                scores = {**micro.tokens.scores, **dict(zip(scoring.columns, found, strict=False))}
                micro = replace(micro, tokens=replace(micro.tokens, scores=scores))
            scored.append(micro)
        return scored

    def with_critic_advantages(
        self, critic: Critic, micros: list[TrainMicroBatch], prepared: Prepared
    ) -> tuple[list[TrainMicroBatch], dict[str, float]]:
        """(`micros`, metrics of the advantages): micro-batches whose objective needs values are replaced by copies with
        per-token advantages from the critic. Stores the mean advantage of each sample in `prepared`. Collective."""
        valued = [micro.objective.needs_values for micro in micros]
        known, metrics = critic.estimate(
            [micro.tokens if wanted else None for micro, wanted in zip(micros, valued, strict=True)]
        )
        means = torch.zeros(len(prepared.samples), dtype=torch.float64, device=self.device)
        for micro, tokens in zip(micros, known, strict=True):
            if tokens is not None:
                means[micro.indices] = (tokens.spans.totals(tokens.advantages) / tokens.spans.lengths).double()
        rows = np.array([self.algorithms.objectives[number].needs_values for number in prepared.objectives], bool)
        prepared.batch_advantages[np.array(prepared.batch_indices, int)[rows]] = self.ranks.total(means).cpu()[rows]
        columns = zip(micros, known, valued, strict=True)
        return [replace(micro, tokens=tokens) if wanted else micro for micro, tokens, wanted in columns], metrics

    def with_norm_advantages(
        self, objective: Objective, micros: list[TrainMicroBatch], prepared: Prepared
    ) -> list[TrainMicroBatch]:
        """`micros`, in which those of `objective` are replaced by copies with advantages from the gradient norm of each
        response. Stores these advantages in `prepared` too. Collective."""
        lengths = [float(input_tokens(sample)) for sample in prepared.samples]
        objectives = [self.algorithms.objectives[number] for number in prepared.objectives]
        groups = [group for group in prepared.spread_groups if objectives[group[0][0]] is objective]
        responses = [rows for group in groups for rows in group]
        norms = response_norms(
            self.backend, self.device, responses, lambda rows: self.build_micros(prepared, rows, lengths)
        )
        objective.set_norm_advantages(prepared, *norms, groups)

        def with_advantages(tokens: ResponseTokens, indices: list[int]) -> ResponseTokens:
            return replace(tokens, advantages=objective.tokens(prepared, indices, self.device).advantages)

        return [
            replace(micro, tokens=with_advantages(micro.tokens, micro.indices))
            if micro.tokens and micro.objective is objective
            else micro
            for micro in micros
        ]

    def with_contexts(
        self, objective: Objective, micros: list[TrainMicroBatch], observe: TokenObserver
    ) -> list[TrainMicroBatch]:
        """`micros`, in which those of `objective` are replaced by copies with a `BatchContext`: inputs of the loss that
        are computed over the whole batch from log-probabilities before the first optimizer step, which `observe`
        records. Collective."""
        scored = []
        for micro in micros:
            if micro.tokens is not None and micro.objective is objective:
                logprobs = micro.tokens.scores["initial_logprobs"]
                observe(micro.indices, logprobs, micro.tokens.scores["initial_entropies"], micro.tokens)
                scored.append((micro.tokens, logprobs))
        contexts = iter(objective.batch_contexts(scored, self.device))
        return [
            replace(micro, context=next(contexts)) if micro.tokens and micro.objective is objective else micro
            for micro in micros
        ]

    def next_lr(self) -> float:
        """Learning rate of the next optimizer step, by `learner.lr_schedule`."""
        section, warmup = self.config.learner, self.config.critic.warmup_batches if self.critic else 0
        return section.lr * lr_share(section, self.optimizer_steps, self.config.schedule.max_steps - warmup)

    def update(self, lr: float) -> None:
        self.optimizer.step(lr)
        self.part.steps += 1

    def weights(self) -> dict[str, Tensor]:
        """All weights by Hugging Face name, in the workers' dtype, on the CPU of rank 0; {} on other ranks."""
        return self.backend.weights(self.generation_dtype)

    def weights_to_publish(self) -> Mapping[str, Tensor] | AdapterWeights:
        """Tensors to send to the workers, on rank 0: all weights or an adapter; {} on other ranks."""
        return self.backend.weights_to_publish(self.generation_dtype)

    @property
    def generation_dtype(self) -> torch.dtype | None:
        """Dtype of the weights that workers generate with; None: the dtype they are trained in."""
        return None if self.device.type == "cpu" else torch.bfloat16

    def canary(self) -> Canary:
        """A fixed text with its log-probabilities under the current weights; workers check theirs by it. Collective."""
        return self.canaries.scored()

    def restore(self) -> int:
        """Load the newest complete checkpoint and return its policy step; 0 without one (the starting weights)."""
        if found := self.checkpoints.newest():
            checkpoint.check_adapter(self.directory, found.step, self.backend.adapter)
            checkpoint.check_critic(self.directory, found.step, self.parts)
            checkpoint.check_optimizer(self.directory, found.step, self.parts)
            self.checkpoints.restore(found, self.parts)
            self.step_count = found.step
        return self.step_count

    def device_tensors(self) -> Iterator[Tensor]:
        """Tensors that this rank keeps on its device between two batches: parameters, buffers, optimizer state.
        Gradients are freed."""
        for part in self.parts:
            part.optimizer.zero_grad()
            yield from (each for each in part.optimizer.tensors() if each.device.type == self.device.type)
        self.backend.free_gathered()
        held = self.reference, self.teacher and self.teacher.model
        for model in filter(None, dict.fromkeys((*(part.model for part in self.parts), *held))):  # each once
            yield from model.parameters()
            yield from model.buffers()

    def start_save(self) -> None:
        """Copy the state and start writing the checkpoint of `step_count` in a thread; waits first for a checkpoint
        that is still being written."""
        self.checkpoints.start(self.step_count, self.parts, self.backend.adapter)

    def saved(self, wait: bool = False) -> int | None:
        """Step of the checkpoint that `start_save` began, if its write has ended since the last call; otherwise None.
        `wait`: first wait for a write that is going on. Re-raises an error of the writing thread."""
        return self.checkpoints.completed(wait)

    def save(self) -> None:
        """Write the checkpoint of `step_count`; returns once it is on disk."""
        self.start_save()
        self.saved(wait=True)
        dist.barrier()

    @property
    def oldest_checkpoint(self) -> int:
        """Step of the oldest checkpoint that a learner may resume from; 0, the starting weights, until
        `learner.keep_checkpoints` exist."""
        newest = checkpoint.steps(self.directory)[-self.config.learner.keep_checkpoints :]
        return newest[0] if len(newest) >= self.config.learner.keep_checkpoints else 0

    def export_best(self, step: int) -> None:
        """Load the policy of checkpoint `step` and write it as a Hugging Face folder, `checkpoints/best`; remove all
        checkpoints but it and the newest ones. Steps below 1 have no checkpoint. Collective."""
        found = self.checkpoints.find(step) if step > 0 else None
        if step > 0 and found is None:
            log.error("the best weights are of step %d, whose checkpoint is not whole; they are not exported", step)
            return
        self.checkpoints.prune({step})
        if found:
            self.checkpoints.restore(found, [self.part])
            self.write_model(self.config.exported_best)
            self.checkpoints.copies.export(self.config.exported_best)

    def export(self) -> None:
        """Write the policy as a Hugging Face folder, and a LoRA adapter also into `checkpoints/adapter`. Collective."""
        self.write_model(self.config.exported_policy)
        self.checkpoints.copies.export(self.config.exported_policy)
        if self.config.lora.is_set:
            base, adapter = self.config.model.named(), self.backend.adapter
            exports.export_adapter(self.policy, adapter, base, self.config.exported_adapter)
            self.checkpoints.copies.export(self.config.exported_adapter)

    def write_model(self, out_dir: Path) -> None:
        """Write the current weights as a Hugging Face folder, in the dtype of the starting model: each rank a part,
        rank 0 all where they cannot be divided. Collective."""
        source = self.config.model.path
        dtype = checkpoint.dtype_of_folder(source)
        if dist.get_world_size() > 1 and (tensors := self.backend.divisible_weights()):
            return exports.export_parts(tensors, dtype, source, out_dir)
        exports.export(self.backend.lm, self.backend.weights(dtype), source, out_dir)
