"""The band of rounding between learner and engine on a card, in bf16 and fp16, and what the canary sees through it.

A random model, with logits as large as a trained one's, is trained on what two engines generate, one in each type.
After each step both engines get the new weights and score the canary; in place of the last version the faults are
planted, one after the other.
"""

import copy
import gc
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from part import QWEN3_SHAPES, Part, random_model
from transformers.utils import logging

from april.config import Config
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.trainer import Trainer
from april.weights.canary import Canary
from april.weights.receiver import StagedWeights
from april.wire.message import Version
from april.workers.engines.base import Request
from april.workers.engines.conformance.scores import FAULTS
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.weight_loading import WeightCheck, WrongWeights

SHAPES = {"0.6B": 8.0, "small": 3.0, "1.7B": 7.0}
"""Shapes by worth, and the seconds that each may take."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
LR = 5e-4
STEPS = 3
GROUPS, GROUP = 4, 8
PROMPT, RESPONSE = 16, 24
HEAD_GAIN = 4.0
"""Weight of the last norm. With 1, a random model's logits would be some tenths, and so would be what faults change."""
QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True)
class Published:
    """A version as it leaves the learner, on its device."""

    version: Version
    tensors: dict[str, torch.Tensor]
    canary: Canary

    def staged(self) -> StagedWeights:
        """The version as it arrives at a worker; its number stands for the digest of its bytes."""
        return StagedWeights(self.version, self.tensors, 0.0, canary=self.canary, digest=str(1 + self.version.step))


class Band:
    """The measurements of one shape. Figures of all shapes are collected in `found`."""

    def __init__(self, part: Part, shape: str, folder: Path, found: "defaultdict[str, list[float]]"):
        self.part, self.name, self.found = part, shape.lower().replace(".", "_"), found
        self.vocabulary = QWEN3_SHAPES[shape]["vocab_size"]
        self.trainer = Trainer(config_of(folder), part.device)
        self.engines = {
            name: TorchEngine(with_dtype(folder, dtype), GROUPS * GROUP, PROMPT + RESPONSE, device=part.device.type)
            for name, dtype in DTYPES.items()
        }
        self.checks = {name: WeightCheck() for name in DTYPES}
        self.checks_before = self.checks
        """The checks as they were before the last version."""

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def measure(self) -> None:
        published, alarms, gaps = [self.publish()], dict.fromkeys(DTYPES, 0), {name: [] for name in DTYPES}
        canary_gaps = {name: [] for name in DTYPES}
        for step in range(STEPS + 1):
            self.checks_before = copy.deepcopy(self.checks)
            for name, engine in self.engines.items():
                scored = self.score(engine, published[-1], published[-1].tensors)
                canary_gaps[name].append(np.abs(scored - published[-1].canary.logprobs))
                alarms[name] += not self.holds(name, self.checks[name], published[-1], scored)
            if step < STEPS:
                for name, found in self.train(step).items():
                    gaps[name].append(found)
                published = [published[-1], self.publish()]
        for name in DTYPES:
            self.record(name, gaps[name], np.stack(canary_gaps[name]), alarms[name])
        for name in DTYPES:
            self.plant_faults(name, *published)

    @torch.no_grad()
    def publish(self) -> Published:
        """The version that the trainer has, in the type that it publishes, on its device."""
        trainer = self.trainer
        canary, dtype = trainer.canary(), trainer.generation_dtype
        whole = {name: tensor.full_tensor() for name, tensor in trainer.backend.tensors()}
        tensors = {name: tensor.to(dtype or tensor.dtype, copy=True) for name, tensor in whole.items()}
        return Published(Version(0, trainer.step_count), tensors, canary)

    def score(self, engine: TorchEngine, published: Published, tensors: dict[str, torch.Tensor]) -> np.ndarray:
        """Log-probabilities of the canary by an engine with `tensors`, float32 [T - 1]."""
        engine.load_weights(published.version, tensors)
        return engine.score(published.canary.text)

    def holds(self, name: str, check: WeightCheck, published: Published, scored: np.ndarray) -> bool:
        """Whether a worker whose engine scores the canary so passes for one that holds the version."""
        try:
            check.judge(published.staged(), published.canary, scored, self.engines[name].dtype)
        except WrongWeights:
            return False
        return True

    def train(self, step: int) -> dict[str, np.ndarray]:
        """One step on samples of both engines; by engine, log-probabilities of the learner less those of the engine."""
        groups = [group for engine in self.engines.values() for group in self.generate(engine, step)]
        batch = TrainingBatch(self.trainer.step_count, groups)
        ready = self.trainer.prepare(batch)
        metrics = self.trainer.step(batch, ready)
        assert not metrics["update_skipped"] and self.trainer.token_stats is not None, metrics
        origin = {id(sample): i * len(DTYPES) // len(batch.samples) for i, sample in enumerate(batch.samples)}
        by_engine = [[] for _ in DTYPES]
        columns = self.trainer.token_stats.per_sample()
        for sample, (logprobs, _) in zip(ready.prepared.samples, columns, strict=True):
            by_engine[origin[id(sample)]].append(logprobs - sample.logprobs)
        return {name: np.concatenate(found) for name, found in zip(DTYPES, by_engine, strict=True)}

    def generate(self, engine: TorchEngine, step: int) -> list[list[TrainSample]]:
        """Groups of samples with random prompts and rewards."""
        rng = np.random.default_rng(step)
        prompts = rng.integers(2, self.vocabulary, (GROUPS * GROUP, PROMPT)).astype(np.int32)
        for i, prompt in enumerate(prompts):
            engine.submit(Request(i, prompt, RESPONSE, seed=i))
        chunks: list[list] = [[] for _ in prompts]
        while engine.live:
            for chunk in engine.step():
                chunks[chunk.id].append(chunk)
        samples = []
        for prompt, own in zip(prompts, chunks, strict=True):
            tokens = np.concatenate([prompt, *(chunk.tokens for chunk in own)])
            logprobs = np.concatenate([chunk.logprobs for chunk in own])
            segments = ((0, len(logprobs), engine.version),)
            samples.append(TrainSample(tokens, PROMPT, logprobs, float(rng.normal()), segments))
        return [samples[first : first + GROUP] for first in range(0, len(samples), GROUP)]

    def record(self, name: str, by_step: list[np.ndarray], canary: np.ndarray, alarms: int) -> None:
        """Rows of one type: how far apart the trained tokens of each step are, `by_step` [K] each, and the canary's
        tokens in each version, `canary` [versions, T - 1]; in nats."""
        part, suffix, apart = self.part, f"{name}_{self.name}", np.concatenate(by_step)
        sizes, noise = np.abs(apart), canary.mean(1)
        k3 = float(np.mean(np.expm1(apart) - apart))
        part.row(f"gpu_engine_learner_k3_{suffix}", k3, "nats")
        part.row(f"gpu_engine_learner_mean_{suffix}", [float(np.abs(found).mean()) for found in by_step], "nats")
        for label, share in QUANTILES.items():
            part.row(f"gpu_engine_learner_{label}_{suffix}", float(np.quantile(sizes, share)), "nats")
        part.row(f"gpu_engine_learner_largest_{suffix}", float(sizes.max()), "nats")
        part.row(f"gpu_canary_noise_mean_{suffix}", noise.tolist(), "nats")
        part.row(f"gpu_canary_noise_largest_{suffix}", canary.max(1).tolist(), "nats")
        over_usual = [float(noise[i] / np.median(noise[:i])) for i in range(1, len(noise))]
        part.row(f"gpu_canary_noise_over_usual_{suffix}", over_usual, "ratio")
        part.row(f"gpu_canary_false_alarms_{suffix}", alarms, "alarms")
        self.found["false_alarms"].append(alarms)
        self.found["noise_over_usual"] += over_usual
        self.found[f"k3_{name}"].append(k3)

    def plant_faults(self, name: str, before: Published, last: Published) -> None:
        """Rows of what an engine passes for that has proven the versions before and has the faults in the last."""
        unseen, sizes = [], {}
        for fault, plant in FAULTS.items():
            scored = self.score(self.engines[name], last, plant(before.tensors, last.tensors))
            if self.holds(name, copy.deepcopy(self.checks_before[name]), last, scored):
                unseen.append(fault)
            sizes[fault] = round(float(np.abs(scored - last.canary.logprobs).mean()), 5)
        moved = float(np.abs(np.subtract(last.canary.logprobs, before.canary.logprobs)).mean())
        suffix = f"{name}_{self.name}"
        self.part.row(f"gpu_canary_missed_{suffix}", len(unseen), "faults")
        self.part.fact(f"faults that were not seen, {suffix}", unseen)
        self.part.fact(
            f"mean difference of the canary by fault, {suffix}; the learner's own moved by {moved:.5f}", sizes
        )
        self.found["missed"].append(len(unseen))


@torch.no_grad()
def make_model(folder: Path, shape: str, device: str) -> Path:
    """Write a Hugging Face folder with a random model in bf16 whose last norm has `HEAD_GAIN`; returns the folder."""
    model = random_model(shape, torch.bfloat16, PROMPT + RESPONSE, device)
    model.model.norm.weight.fill_(HEAD_GAIN)
    model.save_pretrained(folder)
    return folder


def config_of(folder: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": folder},
            "data": {"path": "none.jsonl", "max_prompt_tokens": PROMPT},
            "sampling": {"max_response_tokens": RESPONSE},
            "run": {"dir": folder.parent},
            "learner": {"ranks": 1, "lr": LR, "microbatch_tokens": 8192},
        }
    )


def with_dtype(folder: Path, dtype: str) -> Path:
    """A folder beside it whose config.json names `dtype`; weights come from the learner."""
    copy = folder.with_name(f"{folder.name}-{dtype}")
    copy.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    return copy


@contextmanager
def band_of(part: Part, shape: str, found: "defaultdict[str, list[float]]") -> Iterator[Band]:
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="april-gpu-", dir=in_memory if in_memory.is_dir() else None) as made:
        band = Band(part, shape, make_model(Path(made) / "model", shape, part.device.type), found)
        try:
            yield band
        finally:
            band.close()


def main() -> None:
    part = Part.from_command_line(__doc__.partition("\n")[0])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if part.device.type == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    backends = "cpu:gloo" if part.device.type == "cpu" else "cuda:nccl,cpu:gloo"
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for shape, needed_s in {"tiny": 5.0, "small": 5.0}.items() if part.tiny else SHAPES.items():
        if part.enough_time(shape, needed_s):
            with part.attempt(shape), band_of(part, shape, found) as band:
                band.measure()
            band = None
            gc.collect()
    if found["missed"]:
        for name in DTYPES:
            part.row(f"gpu_engine_learner_k3_{name}", max(found[f"k3_{name}"]), "nats")
        part.row("gpu_canary_noise_over_usual", max(found["noise_over_usual"]), "ratio")
        part.row("gpu_canary_false_alarms", sum(found["false_alarms"]), "alarms")
        part.row("gpu_canary_missed", sum(found["missed"]), "faults")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
