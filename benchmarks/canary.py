"""Proof of weights: what it misses, when it cries wolf, what it costs, on the quickstart's policy.

Each run trains the warm-started policy on batches of its own and gives every version to an engine. In place of its last
version the faults are planted, one after the other. `--engines torch` leaves SGLang out.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from common import Row, parser, report, start_sglang

from april.config import Config
from april.launch.sft.warm_start import make_policy
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.policy.arithmetic import VOCABULARY
from april.learner.trainer import Trainer
from april.weights.canary import Canary
from april.weights.receiver import StagedWeights
from april.weights.snapshot import pack
from april.wire.message import Version
from april.workers.engines.base import Engine
from april.workers.engines.conformance.scores import FAULTS
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.weight_loading import WeightCheck, WrongWeights

CPU = torch.device("cpu")
QUICKSTART_LR = 5e-4
SMALL_LR = 1e-6
"""A learning rate that is usual for models with billions of parameters."""
LONG_STEP_S = 5.0
"""Shortest step for which the canary's share has a goal (seconds)."""
GROUP = 8
VERSIONS = 6
"""Versions of a run, with the first one."""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engines", default="torch,sglang", help="engines to measure, with commas")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder) / "policy", log=lambda line: None)
        runs = [train(policy, Path(folder), seed) for seed in range(1 if given.quick else 10)]
        rows, costs = [], {}
        for name in given.engines.split(","):
            with ENGINES[name](policy, Path(folder)) as engine:
                rows += measure(name, engine, runs)
                costs[name] = [timed(lambda: engine.score(runs[0][-1].canary.text)) for _ in range(20)]
        rows[:0] = [sum_over_engines(rows, "canary_missed"), sum_over_engines(rows, "canary_false_alarms")]
        with torch_engine(policy, Path(folder)) as engine:
            rows += [
                stale_tensors_seen("quickstart_lr", engine, runs[0]),
                stale_tensors_seen("lr_1e-6", engine, train(policy, Path(folder), seed=0, lr=SMALL_LR)),
            ]
        rows += cost(policy, Path(folder), costs, given.quick)
    report(rows, given.json)


# --- versions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A version as it leaves the learner."""

    version: Version
    tensors: dict[str, torch.Tensor]
    canary: Canary
    digest: str

    def staged(self) -> StagedWeights:
        return StagedWeights(self.version, self.tensors, 0.0, canary=self.canary, digest=self.digest)


def trainer_of(policy: Path, folder: Path, lr: float) -> Trainer:
    tree = {
        "model": {"path": policy},
        "data": {"path": "unused.jsonl"},
        "run": {"dir": folder, "name": "run"},
        "learner": {"lr": lr, "device": "cpu", "ranks": 1},
    }
    return Trainer(Config.model_validate(tree), CPU)


def train(policy: Path, folder: Path, seed: int, lr: float = QUICKSTART_LR) -> list[Published]:
    trainer = trainer_of(policy, folder, lr)
    published = [publish(trainer)]
    for step in range(VERSIONS - 1):
        trainer.step(random_batch(step, np.random.default_rng([seed, step]), groups=2, response_tokens=64))
        published.append(publish(trainer))
    return published


def publish(trainer: Trainer) -> Published:
    version = Version(0, trainer.step_count)
    canary, tensors = trainer.canary(), trainer.weights()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    return Published(version, kept, canary, pack(version, kept).digest)


def random_batch(step: int, rng: np.random.Generator, groups: int, response_tokens: int) -> TrainingBatch:
    def sample() -> TrainSample:
        tokens = rng.integers(0, len(VOCABULARY), 8 + response_tokens).astype(np.int32)
        logprobs = np.full(response_tokens, -np.log(len(VOCABULARY)), np.float32)
        segments = ((0, response_tokens, Version(0, step)),)
        return TrainSample(tokens, 8, logprobs, float(rng.integers(2)), segments)

    return TrainingBatch(step, [[sample() for _ in range(GROUP)] for _ in range(groups)])


# --- engines ---------------------------------------------------------------------------------------------------------


@contextmanager
def torch_engine(policy: Path, folder: Path) -> Iterator[TorchEngine]:
    engine = TorchEngine(policy)
    yield engine
    engine.close()


@contextmanager
def sglang_engine(policy: Path, folder: Path) -> Iterator[SGLangEngine]:
    server = start_sglang(policy, folder / "server.log", slots=8, context_tokens=512)
    engine = SGLangEngine(policy, len(VOCABULARY), 512, slots=8, url=server.url)
    yield engine
    engine.close()
    server.kill()


ENGINES: dict[str, Callable] = {"torch": torch_engine, "sglang": sglang_engine}


# --- what is measured ------------------------------------------------------------------------------------------------


def measure(name: str, engine: Engine, runs: list[list[Published]]) -> Iterator[Row]:
    alarms, missed, noise, largest = [], [], [], []
    for published in runs:
        proof = WeightCheck()
        alarms.append(float(sum(not passes(engine, proof, version, version.tensors) for version in published)))
        before, last = published[-2:]
        apart = np.abs(engine.score(last.canary.text) - last.canary.logprobs)
        noise.append(float(apart.mean()))
        largest.append(float(apart.max()))
        wrong = {fault: plant(before.tensors, last.tensors) for fault, plant in FAULTS.items()}
        unseen = [fault for fault, tensors in wrong.items() if follows(engine, before, last, tensors)]
        missed.append(float(len(unseen)))
    yield Row(f"canary_missed_{name}", missed, "faults", of=sum)
    yield Row(f"canary_false_alarms_{name}", alarms, "alarms", of=sum)
    yield Row(f"canary_noise_mean_{name}", noise, "nats", of=max)
    yield Row(f"canary_noise_largest_{name}", largest, "nats", of=max)


def passes(engine: Engine, check: WeightCheck, published: Published, held: dict[str, torch.Tensor]) -> bool:
    """Whether an engine that holds these tensors passes for one with the published version, by its scores."""
    engine.load_weights(published.version, held)
    try:
        check.judge(published.staged(), published.canary, engine.score(published.canary.text), engine.dtype)
    except WrongWeights:
        return False
    return True


def sum_over_engines(rows: list[Row], name: str) -> Row:
    """The sum of a row over all engines."""
    own = [row for row in rows if row.name.startswith(name)]
    return Row(name, [value for row in own for value in row.measured], own[0].unit, of=sum)


def follows(engine: Engine, before: Published, last: Published, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether an engine with these tensors passes after it has passed with the version before."""
    proof = WeightCheck()
    return passes(engine, proof, before, before.tensors) and passes(engine, proof, last, tensors)


def stale_tensors_seen(name: str, engine: Engine, published: list[Published]) -> Row:
    """Share of tensors whose staleness is seen: each in turn is that of the version before."""
    before, last = published[-2:]
    seen = [
        float(not follows(engine, before, last, last.tensors | {tensor: before.tensors[tensor]}))
        for tensor in last.tensors
    ]
    return Row(f"canary_one_stale_tensor_seen_{name}", seen, "share", of=statistics.mean)


def cost(policy: Path, folder: Path, engines: dict[str, list[float]], quick: bool) -> Iterator[Row]:
    trainer = trainer_of(policy, folder, SMALL_LR)
    trainer.canary()
    learner = [timed(trainer.canary) for _ in range(20)]
    yield Row("canary_cost_learner", [1000 * seconds for seconds in learner], "ms")
    for name, seconds in engines.items():
        yield Row(f"canary_cost_{name}", [1000 * value for value in seconds], "ms")
    groups, steps = 4 if quick else 48, []
    for step in range(1 if quick else 3):
        batch = random_batch(step, np.random.default_rng(step), groups, response_tokens=256)
        steps.append(timed(lambda: trainer.step(batch)))  # noqa: B023
    yield Row("canary_step", steps, "s")
    spent = statistics.median(learner) + max(statistics.median(seconds) for seconds in engines.values())
    if statistics.median(steps) >= LONG_STEP_S:
        yield Row("canary_cost", [spent / step for step in steps], "share of a step", of=max)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
