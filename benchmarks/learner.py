"""The learner's training step against a bare loop, padded batches and TRL; its head's memory; its ranks' balance; LoRA;
the memory of loading.

All on one thread. Response lengths are lognormal, σ = 1, median 128, sequences cut at 2,048 tokens, half the token
budget of a forward pass. The model is a random Qwen3 of 3 million parameters.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import context_parallel
import numpy as np
import peak_memory
import torch
import torch.distributed as dist
import trl_side
from common import ROOT, Row, in_turns, parser, ratios, report
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from april.config import Config, WeightsSection
from april.launch.memory import LOGIT_BYTES
from april.launch.plan import needs_of
from april.launch.sft.warm_start import Recipe
from april.learner import performance
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.head import LOGITS_PER_CHUNK, score_tokens
from april.learner.model import Policy, load
from april.learner.packing import input_tokens, pack, plan
from april.learner.policy.arithmetic import build_model, build_tokenizer, save_policy
from april.learner.samples import SampleWriter
from april.learner.trainer import Trainer
from april.weights.base import AdapterWeights
from april.weights.publisher import WeightPublisher
from april.wire.message import Version
from april.wire.training import SampleSpan

BUDGET_TOKENS = 4096
LONGEST = 2048
GROUP = 8
RANKS = 4
LR = 1e-6
CPU = torch.device("cpu")
STEP_MEASURES = ("step_vs_bare", "step_vs_padded", "step_vs_trl")
SPANS = tuple(SampleSpan("generate", "worker-0", 1.0, 2.0, 0, 99, "abort") for _ in range(3))
LORA_MEASURES = ("lora_step_vs_full", "lora_memory_vs_full", "lora_worker")
PUBLISH_MEASURES = ("lora_publish_vs_full", "lora_publish")
MEMORY_MEASURES = ("logits_memory_ratio", "load_peak_bytes_per_rank")
OPTIMIZER_MEASURES = ("adamw8_memory", "adamw8_step", "muon_memory", "muon_step", "host_step")
PLAN_MEASURES = ("plan_error",)
MEASURES = (
    *OPTIMIZER_MEASURES, *PLAN_MEASURES, *context_parallel.MEASURES, *STEP_MEASURES, *LORA_MEASURES,
    *PUBLISH_MEASURES, "samples_cost", "rank_imbalance", *MEMORY_MEASURES,
)  # fmt: skip
LORA_RANK = 16
SMALL = {
    "vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6,
    "head_dim": 32,
}  # fmt: skip
FIFTY_MILLION = {
    "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 13,
    "num_attention_heads": 8, "head_dim": 64,
}  # fmt: skip
"""48 million parameters"""
PLANNED = {
    "vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 16,
    "num_attention_heads": 6, "head_dim": 64,
}  # fmt: skip


def make_model(folder: Path, shape: dict[str, int]) -> Qwen3Config:
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return config


def trainer_of(folder: Path, learner: Mapping[str, Any] = MappingProxyType({}), **lora: float | bool) -> Trainer:
    config = Config.model_validate(
        {
            "model": {"path": folder},
            "data": {"path": "none.jsonl"},
            "run": {"dir": folder.parent},
            "learner": {"lr": LR, "device": "cpu", "microbatch_tokens": BUDGET_TOKENS, **learner},
            "lora": lora,
        }
    )
    return Trainer(config, CPU)


def longtail_batch(vocabulary: int, groups: int, seed: int) -> TrainingBatch:
    rng = np.random.default_rng(seed)

    def sample() -> TrainSample:
        prompt = int(rng.integers(8, 25))
        response = int(np.clip(rng.lognormal(np.log(128), 1.0), 1, LONGEST - prompt))
        tokens = rng.integers(2, vocabulary, prompt + response).astype(np.int32)
        logprobs = np.full(response, -np.log(vocabulary), np.float32)
        return TrainSample(tokens, prompt, logprobs, float(rng.normal()), ((0, response, Version(0, 0)),))

    return TrainingBatch(0, [[sample() for _ in range(GROUP)] for _ in range(groups)])


class Bare:
    """Packed forward, backward and AdamW in the plainest way: no shards, all logits of a pass at once."""

    def __init__(self, folder: Path, batch: TrainingBatch):
        self.policy = load(folder, temperature=1.0)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LR, fused=True)
        self.samples = batch.samples
        self.packs = [pack(samples, CPU) for (samples,) in plan_passes(self.policy, self.samples, ranks=1)]
        self.tokens = sum(sample.response_tokens for sample in self.samples)

    def step(self) -> None:
        lm = self.policy.lm
        for micro in self.packs:
            hidden = lm.base_model(
                input_ids=micro.ids, position_ids=micro.positions, use_cache=False, seq_lens=micro.seq_lens
            ).last_hidden_state
            distribution = torch.log_softmax(lm.lm_head(hidden[0, micro.target_rows]), -1)
            (distribution.gather(-1, micro.targets[:, None]).sum() / -self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Padded:
    """Rows in the order of arrival, as many as fit the budget when padded to the longest.

    What packing replaces and nothing else: the learner's own head scores every position behind a row's prompt,
    and a mask takes those of the padding out of the loss.
    """

    def __init__(self, folder: Path, batch: TrainingBatch):
        self.lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
        self.optimizer = torch.optim.AdamW(self.lm.parameters(), lr=LR, fused=True)
        self.tokens = sum(sample.response_tokens for sample in batch.samples)
        self.passes = [self.pad(samples) for samples in fill(batch.samples)]

    def pad(self, samples: list[TrainSample]) -> tuple[torch.Tensor, ...]:
        width = max(map(input_tokens, samples))
        ids, mask, targets = torch.zeros(3, len(samples), width, dtype=torch.int64)
        behind_prompt = torch.zeros(len(samples), width, dtype=torch.bool)
        for row, sample in enumerate(samples):
            tokens = torch.from_numpy(sample.tokens.astype(np.int64))
            ids[row, : input_tokens(sample)], targets[row, : input_tokens(sample)] = tokens[:-1], tokens[1:]
            mask[row, : input_tokens(sample)] = 1
            behind_prompt[row, sample.prompt_tokens - 1 :] = True
        return ids, mask, behind_prompt, targets[behind_prompt]

    def step(self) -> None:
        for ids, mask, behind_prompt, targets in self.passes:
            hidden = self.lm.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            logprobs, _ = score_tokens(hidden[behind_prompt], self.lm.lm_head.weight, targets, 1.0)
            ((logprobs * mask[behind_prompt]).sum() / -self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def plan_passes(policy: Policy, samples: list[TrainSample], ranks: int) -> list[list[list[TrainSample]]]:
    """Samples by pass and rank, as the trainer plans them."""
    cost = performance.forward_cost(policy.lm)
    costs = [cost.of(input_tokens(sample), sample.sampled_tokens) for sample in samples]
    passes = plan(list(map(input_tokens, samples)), ranks, BUDGET_TOKENS, costs)
    return [[[samples[i] for i in indices] for indices in abreast] for abreast in passes]


def fill(samples: list[TrainSample]) -> list[list[TrainSample]]:
    """Consecutive samples whose padded rows hold at most the budget."""
    passes = [[]]
    for sample in samples:
        longest = max(map(input_tokens, [*passes[-1], sample]))
        if longest * (len(passes[-1]) + 1) > BUDGET_TOKENS:
            passes.append([])
        passes[-1].append(sample)
    return passes


def seconds(work: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    work()
    return clock() - began


def compare(
    name: str, ours: Callable, theirs: Callable, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> Row:
    """Speed of ours over theirs on the same work, taking turns at going first; the first round is for warming up."""
    speeds = []
    for turn in range(rounds + 1):
        taken = {side: seconds(side, clock) for side in in_turns(turn, theirs, ours)}
        speeds.append(taken[theirs] / taken[ours])
    return Row(name, speeds[1:], "ratio")


def rank_imbalance(policy: Policy, batch: TrainingBatch, rounds: int) -> float:
    """The slowest of `RANKS` over their mean, of passes that run side by side and wait for each other.

    Each pass is timed alone, so that ranks do not compete for this machine's cores; the least of its times counts,
    which is the one that the machine's other work has disturbed least. One half of the rounds says which rank is the
    slowest, the other how slow it is, and the other way round: the largest of several noisy times is too large.
    """
    packs = [[pack(samples, CPU) for samples in abreast] for abreast in plan_passes(policy, batch.samples, RANKS)]

    def run(micro) -> float:
        return seconds(lambda: policy(micro)[0].sum().backward())

    run(packs[0][0])
    times = np.array([[[run(micro) for micro in abreast] for abreast in packs] for _ in range(rounds)])
    even, odd = times[::2].min(0), times[1::2].min(0)
    return statistics.fmean(slowest(*halves).sum() / halves[1].mean(1).sum() for halves in ((even, odd), (odd, even)))


def slowest(chosen_by: np.ndarray, taken_from: np.ndarray) -> np.ndarray:
    """[passes, ranks] twice -> [passes, 1]."""
    return np.take_along_axis(taken_from, chosen_by.argmax(1, keepdims=True), 1)


def step_rows(folder: Path, vocabulary: int, wanted: set[str], quick: bool) -> list[Row]:
    """Speed of `Trainer.step` over that of other ways to do the same."""
    rounds, groups = (1, 1) if quick else (5, 6)
    batch, trainer, rows = longtail_batch(vocabulary, groups, seed=1), trainer_of(folder), []

    def ours(batch: TrainingBatch = batch) -> None:
        assert not trainer.step(batch)["update_skipped"]

    if "step_vs_bare" in wanted:
        rows.append(compare("step_vs_bare", ours, Bare(folder, batch).step, rounds))
    if "step_vs_padded" in wanted:
        rows.append(compare("step_vs_padded", ours, Padded(folder, batch).step, rounds))
    if "step_vs_trl" in wanted:
        small, our_seconds = longtail_batch(vocabulary, min(groups, 4), seed=2), []
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        steps = 2 if quick else 4
        their_seconds = trl_side.train_steps(
            model, vocabulary, small, steps, LR, between=lambda: our_seconds.append(seconds(lambda: ours(small)))
        )
        rows.append(Row("step_vs_trl", ratios(their_seconds, our_seconds)[1:], "ratio"))
    return rows


def lora_rows(folder: Path, quick: bool) -> list[Row]:
    """An adapter in all linear layers against all parameters: speed of a step by processor time, size of the state."""
    vocabulary = make_model(folder, SMALL if quick else FIFTY_MILLION).vocab_size
    batch, trainers = longtail_batch(vocabulary, 1, seed=6), [trainer_of(folder, rank=LORA_RANK), trainer_of(folder)]

    def step(trainer: Trainer) -> None:
        assert not trainer.step(batch)["update_skipped"]

    ours, theirs = (partial(step, trainer) for trainer in trainers)
    speed = compare("lora_step_vs_full", ours, theirs, 1 if quick else 5, clock=time.process_time)
    adapter, whole = map(state_bytes, trainers)
    return [speed, Row("lora_memory_vs_full", [adapter / whole], "ratio"), worker_row(trainers[0])]


def optimizer_rows(folder: Path, quick: bool) -> list[Row]:
    """Each optimizer against AdamW in fp32: bytes of its state, and processor time of its step."""
    vocabulary = make_model(folder, SMALL if quick else FIFTY_MILLION).vocab_size
    batch, plain, rows = longtail_batch(vocabulary, 1, seed=6), trainer_of(folder), []
    plain.step(batch)
    arms = {
        "adamw8": {"optimizer": "adamw_8bit"}, "muon": {"optimizer": "muon"}, "host": {"optimizer_on_host": True},
    }  # fmt: skip

    def optimizer_step(trainer: Trainer) -> None:
        for parameter in trainer.optimizer.parameters:
            parameter.grad = torch.ones_like(parameter)
        trainer.update(LR)

    for name, keys in arms.items():
        trainer = trainer_of(folder, keys)
        trainer.step(batch)
        ours, theirs = (sum(each.nbytes for each in other.optimizer.tensors()) for other in (trainer, plain))
        if name != "host":
            rows.append(Row(f"{name}_memory", [ours / theirs], "ratio"))
        steps = partial(optimizer_step, trainer), partial(optimizer_step, plain)
        rows.append(compare(f"{name}_step", *steps, 2 if quick else 10, clock=time.process_time))
    return rows


PLANS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}), ({"activation_checkpointing": True}, {}), ({}, {"rank": LORA_RANK}), ({"optimizer": "adamw_8bit"}, {}),
    ({"ranks": 2}, {}), ({"ranks": 2}, {"rank": LORA_RANK}),
)  # fmt: skip
"""Keys of [learner] and [lora] that are planned and measured."""


def plan_row(folder: Path) -> Row:
    """How far the memory that a step takes on top of weights and moments is from its plan, as a share of all that is
    planned: with activations kept and recomputed, whole, by an adapter, with moments in 8 bits; on one rank and two."""
    vocabulary, errors = make_model(folder, PLANNED).vocab_size, []
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed is given back, in the processes that measure
    for keys, lora in PLANS:
        store, ranks = folder.with_name(f"{folder.name} {len(errors)}"), keys.get("ranks", 1)
        of_ranks = [(folder, vocabulary, keys, lora, store, rank, ranks) for rank in range(ranks)]
        taken, planned, resting = map(max, zip(*peak_memory.in_processes(measure_step, of_ranks), strict=True))
        what = f"{keys or lora or 'kept'}"
        print(f"  {what}: {taken >> 20:,} MiB, planned {planned >> 20:,}; at rest {resting >> 20:,}", file=sys.stderr)
        errors.append(abs(taken - planned) / (planned + resting))
    return Row("plan_error", errors, "share")


def measure_step(
    folder: Path,
    vocabulary: int,
    keys: dict[str, Any],
    lora: dict[str, Any],
    store: Path,
    rank: int,
    ranks: int,
    writer,
) -> None:
    """Send the peak of a step of two micro-batches above what there is before it, the same as planned, and what there
    is before it as planned: weights and moments (bytes)."""
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, vocabulary, BUDGET_TOKENS // 4).astype(np.int32)
    response, logprobs = len(tokens) - 8, np.full(len(tokens) - 8, -9.0, np.float32)
    spans = ((0, response, Version(0, 0)),)
    batch = TrainingBatch(0, [[TrainSample(tokens, 8, logprobs, float(i), spans) for i in range(8 * ranks)]])
    trainer = trainer_of(folder, {"compute": "fp32", "ranks": 1, **keys}, **lora)
    trainer.step(batch)
    trainer.optimizer.zero_grad()
    taken = peak_memory.peak_above(partial(trainer.step, batch))
    needs = needs_of(trainer.config).learner
    logits = min(LOGITS_PER_CHUNK, 4 * response * vocabulary)
    head = 0 if lora else 8 * vocabulary * PLANNED["hidden_size"]  # the gradient of the head, and a copy of it
    working = logits * LOGIT_BYTES + head
    if keys.get("activation_checkpointing"):
        working = max(working, needs["head or layer"])
    planned = needs["gradients"] + needs["gathered layers"] + needs["activations"] + working
    writer.send((taken, int(planned), int(needs["weights"] + needs["optimizer"])))
    dist.destroy_process_group()


def worker_row(trainer: Trainer) -> Row:
    """Processor time in which a worker makes a version's bfloat16 weights of the adapter that it is sent. The first
    time, which maps the files, is left out."""
    published, seconds = trainer.backend.weights_to_publish(torch.bfloat16), []
    assert isinstance(published, AdapterWeights)
    for _ in range(4):
        began = time.process_time()
        weights = dict(published.base.with_adapter(published.adapter, published.tensors))
        seconds.append((time.process_time() - began) / sum(each.numel() for each in weights.values()) * 1e9)
    return Row("lora_worker", seconds[1:], "s per billion")


def publish_rows(folder: Path) -> list[Row]:
    """Published bytes of a version of `configs/quickstart-lora.toml`, and over those of a version with all weights."""
    recipe = Recipe()
    save_policy(build_model(recipe.hidden_size, recipe.layers, seed=0), folder)
    lora = tomllib.loads((ROOT / "configs/quickstart-lora.toml").read_text())["lora"]
    sizes = []
    for section in (lora, {}):
        publisher = WeightPublisher(WeightsSection(), "benchmark", "cpu")
        sizes.append(
            publisher.publish(Version(0, 0), trainer_of(folder, **section).weights_to_publish())["publish_bytes"]
        )
        publisher.close()
    adapter, whole = sizes
    return [Row("lora_publish_vs_full", [adapter / whole], "ratio"), Row("lora_publish", [adapter], "bytes")]


def state_bytes(trainer: Trainer) -> int:
    """Bytes of this rank's parameters, gradients and moments after a step."""
    parameters = list(trainer.policy.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return sum(tensor.nbytes for tensor in (*parameters, *gradients, *trainer.optimizer.tensors()))


def samples_row(folder: Path, vocabulary: int, quick: bool) -> Row:
    """Processor time of writing a step's samples, by default 8 groups and their histories, over that of the step."""
    build_tokenizer().save_pretrained(folder)
    trainer, shares = trainer_of(folder), []
    keeper = SampleWriter(trainer.config)
    batch = longtail_batch(vocabulary, 4 if quick else 16, seed=5)
    batch = TrainingBatch(
        0, [[replace(sample, spans=SPANS, details={"correct": 1.0}) for sample in group] for group in batch.groups]
    )
    for _ in range(2 if quick else 4):
        ready, began = trainer.prepare(batch), time.process_time()
        trainer.step(batch, ready)
        stepped = time.process_time()
        keeper._write(batch, ready.prepared, trainer.token_stats, False)
        shares.append((time.process_time() - stepped) / (stepped - began))
    return Row("samples_cost", shares[1:], "of a step")


def balance_rows(folder: Path, vocabulary: int, quick: bool) -> list[Row]:
    policy, seeds, groups = load(folder, temperature=1.0), *(([3], 4) if quick else ([3, 4, 5], 32))
    batches = [longtail_batch(vocabulary, groups, seed) for seed in seeds]
    imbalances = [rank_imbalance(policy, batch, rounds=2 if quick else 8) for batch in batches]
    return [Row("rank_imbalance", imbalances, "ratio")]


def loading_row(folder: Path, quick: bool) -> Row:
    make_model(folder, SMALL if quick else FIFTY_MILLION)
    peaks = peak_memory.loading_peaks_over_bound(folder)
    return Row("load_peak_bytes_per_rank", peaks, "of model / ranks + largest tensor")


def memory_rows(quick: bool) -> list[Row]:
    peaks = [peak_memory.head_peak_bytes(score, quick) for score in (peak_memory.chunked_head, peak_memory.full_head)]
    return [Row("logits_memory_ratio", [peaks[0] / peaks[1]], "ratio"), Row("logits_memory", [peaks[0] / 2**20], "MiB")]


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--only", nargs="+", choices=MEASURES, metavar="NAME", help="these rows")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wanted, rows = set(options.only or MEASURES), []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "model"
        vocabulary = make_model(folder, SMALL).vocab_size
        dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
        if wanted.intersection(STEP_MEASURES):
            rows += step_rows(folder, vocabulary, wanted, options.quick)
        if wanted.intersection(LORA_MEASURES):
            rows += lora_rows(Path(made) / "for an adapter", options.quick)
        if wanted.intersection(OPTIMIZER_MEASURES):
            rows += optimizer_rows(Path(made) / "optimizers", options.quick)
        if wanted.intersection(PLAN_MEASURES):
            rows.append(plan_row(Path(made) / "plan"))
        rows += context_parallel.rows(Path(made) / "context", wanted, options.quick)
        if wanted.intersection(PUBLISH_MEASURES):
            rows += publish_rows(Path(made) / "quickstart")
        if "samples_cost" in wanted:
            rows.append(samples_row(folder, vocabulary, options.quick))
        if "rank_imbalance" in wanted:
            rows += balance_rows(folder, vocabulary, options.quick)
        dist.destroy_process_group()
        if "load_peak_bytes_per_rank" in wanted:
            rows.append(loading_row(Path(made) / "to load", options.quick))
    if "logits_memory_ratio" in wanted:
        rows += memory_rows(options.quick)
    report(rows, options.json)


if __name__ == "__main__":
    main()
