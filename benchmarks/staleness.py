"""How well the quickstart's policy learns from stale samples: the default correction at forced staleness 0, 2, 5, 8.

Engine and trainer are those of a run, in one process with a queue of weight versions between them: batch t is
sampled from weights t - k (the starting policy up to t = k), and a run of staleness k trains 20 + k batches.
Seeds are paired: the same prompts and sample seeds at every level. Held-out accuracy is at temperature 1.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
import tempfile
import tomllib
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean
from zlib import crc32

import numpy as np
import orjson
import torch
import torch.distributed as dist
from common import Row, parser, read_runs, report, write_run

from april.config import Config
from april.data.arithmetic import Task, draw_task
from april.data.tokenizer import Tokenizer
from april.learner.batch import Batch, TrainSample
from april.learner.trainer import Trainer
from april.policy.make_policy import make_policy
from april.wire.version import Version
from april.workers.engines.base import Request
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.folder_weights import load_folder_weights
from april.workers.rewards.text import final_answer

ROOT = Path(__file__).parent.parent
LEVELS = (0, 2, 5, 8)
STEPS = 20
"""batches on-policy; staleness k trains k more"""
GROUPS, SAMPLES, RESPONSE_TOKENS = 32, 8, 512
HELD_OUT = 2048
SLOTS = 256
COLLAPSED = (0.25, 3)
"""a run ends after so many batches in a row below this reward, less than half of that at the start: none has come back
from there, and its responses grow to the limit, so that an eighth of the held-out prompts has to do"""

UNBOUNDED = 1e6
"""a bound of the ratio that none meets"""
WEIGHED = {"proximal": "recomputed", "behaviour_coef": 0.0}
ROOT_ESS = WEIGHED | {"corrections": ["truncated_sequence"], "sequence_truncation": 8.0, "step_scale": "root_ess"}
CORRECTIONS = {
    "default": {},
    "not_drawn": WEIGHED | {"corrections": ["truncated_sequence"]},
    "none": WEIGHED | {"corrections": []},
    "clip": WEIGHED | {"proximal": "behaviour", "corrections": []},
    "clip_drawn": {"proximal": "behaviour", "corrections": []},
    "truncated": WEIGHED | {"corrections": ["truncated"]},
    "icepop": WEIGHED | {"corrections": ["icepop"]},
    "geometric": WEIGHED | {"proximal": "behaviour", "corrections": ["geometric"]},
    "geometric_drawn": {"proximal": "behaviour", "corrections": ["geometric"]},
    "decoupled": WEIGHED | {"proximal": "interpolated", "corrections": ["truncated"]},
    "vespo": WEIGHED | {"corrections": ["vespo"]},
    "m2po": WEIGHED | {"proximal": "behaviour", "corrections": ["m2po"], "clip_low": 1.0, "clip_high": UNBOUNDED},
    "dppo_tv": WEIGHED | {"corrections": ["truncated", "dppo_tv"], "truncation": 20.0},
    "bapo": WEIGHED | {"proximal": "behaviour", "corrections": [], "loss": "bapo", "clip_low": 0.4, "clip_high": 0.2},
    "root_ess": ROOT_ESS,
    "vcpo": ROOT_ESS | {"advantage": "opob"},
    "default_root_ess": {"step_scale": "root_ess"},
}
"""what `--all` compares: the default draws tokens towards what sampled them, so do the `…_drawn`; `not_drawn` is the
default without that. `vespo`, `m2po`, `dppo_tv`, `bapo` and `vcpo` are as published, `root_ess` is `vcpo` without its
baseline, `default_root_ess` its step with the default. Decoupled around the recomputed proximal policy is `truncated`,
with one step a batch, and `on_policy_only` trains nothing where every token is stale"""

PPO = "ppo"
"""what `--ppo` compares with on-policy GRPO: configs/ppo.toml, a critic"""
LORA = "lora"
"""what `--lora` compares with training the whole model: configs/quickstart-lora.toml, on-policy"""
FILES = {PPO: "ppo", LORA: "quickstart-lora"}
STALE = (5, 0.4)
"""(versions, share): there so large a share of a batch was sampled so many versions ago, the rest by those at hand"""


@dataclass(frozen=True)
class Job:
    name: str
    """of CORRECTIONS, or PPO, or LORA"""
    staleness: int
    seed: int
    steps: int
    held_out: int
    policy: Path
    algorithm: dict = field(default_factory=dict)
    """further keys of the configuration's [algorithm]"""
    share: float = 1.0
    """of the groups that are stale"""


@dataclass(frozen=True)
class Outcome:
    job: Job
    held_out: float
    rewards: list[float]
    """of each batch, as it was sampled"""
    metrics: dict[str, float]
    """means over the batches"""


Weights = tuple[Version, dict[str, torch.Tensor]]


class Sampler:
    """The torch engine, the task's prompts and its verifier."""

    def __init__(self, policy: Path):
        self.tokenizer = Tokenizer(policy)
        self.engine = TorchEngine(policy, slots=SLOTS, max_context=RESPONSE_TOKENS + 32)
        self.stop = frozenset(self.tokenizer.eos_token_ids)

    def sample(self, tasks: list[Task], seed: int) -> list[TrainSample]:
        """One scored response to each task, under the weights that the engine holds."""
        prompts = [self.tokenizer.encode_prompt(task.prompt) for task in tasks]
        for i, prompt in enumerate(prompts):
            tokens = np.asarray(prompt, np.int32)
            self.engine.submit(Request(i, tokens, RESPONSE_TOKENS, seed=seed + i, stop_token_ids=self.stop))
        chunks, ended = [[] for _ in tasks], {}
        while self.engine.live:
            for chunk in self.engine.step():
                chunks[chunk.id].append(chunk)
                if chunk.finish_reason:
                    ended[chunk.id] = chunk.finish_reason
        return [
            self.scored(task, np.asarray(prompt, np.int32), of_sample, ended[i])
            for i, (task, prompt, of_sample) in enumerate(zip(tasks, prompts, chunks, strict=True))
        ]

    def scored(self, task: Task, prompt: np.ndarray, chunks: list, reason: str) -> TrainSample:
        response = np.concatenate([chunk.tokens for chunk in chunks])
        logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
        reward = final_answer(self.tokenizer.decode(response), task.answer, reason)
        segments = ((0, len(response), self.engine.version),)
        return TrainSample(np.concatenate([prompt, response]), len(prompt), logprobs, reward, segments)

    def held_out(self, count: int) -> float:
        """Accuracy of one response to each of `count` held-out prompts, the same ones every time."""
        random = Random("held-out")
        samples = self.sample([draw_task(random, "heldout") for _ in range(count)], seed=10**9)
        return fmean(sample.reward for sample in samples)


def train(job: Job) -> Outcome:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(configuration(job, Path(folder)), torch.device("cpu"))
        sampler, history = Sampler(job.policy), deque(maxlen=job.staleness + 1)
        rewards, metrics, held_out = [], [], job.held_out
        for step in range(job.steps + job.staleness):
            history.append(trainer.weights())
            stale = Version(0, max(0, step - job.staleness)), history[0]
            metrics.append(trainer.step(draw_batch(sampler, job, step, stale, (Version(0, step), history[-1]))))
            rewards.append(metrics[-1]["reward"])
            least, in_a_row = COLLAPSED
            if len(rewards) >= in_a_row and max(rewards[-in_a_row:]) < least:
                held_out //= 8
                break
        sampler.engine.load_weights(Version(0, len(rewards)), trainer.weights())
        means = {name: fmean(m[name] for m in metrics if name in m) for name in sorted(set().union(*metrics))}
        return Outcome(job, sampler.held_out(held_out), rewards, means)
    finally:
        dist.destroy_process_group()


def configuration(job: Job, folder: Path) -> Config:
    """The quickstart's with this job's correction, or that of PPO or LORA."""
    file = ROOT / f"configs/{FILES.get(job.name, 'quickstart')}.toml"
    tree = tomllib.loads(file.read_text())
    tree["model"], tree["run"] = {"path": job.policy}, {"dir": folder}
    tree["learner"] |= {"ranks": 1, "device": "cpu"}
    tree["algorithm"] = tree.get("algorithm", {}) | CORRECTIONS.get(job.name, {}) | job.algorithm
    return Config.model_validate(tree)


def draw_batch(sampler: Sampler, job: Job, step: int, stale: Weights, fresh: Weights) -> Batch:
    random = Random(f"{job.seed} {step}")
    tasks = [task for _ in range(GROUPS) for task in [draw_task(random)] * SAMPLES]
    cut = round(GROUPS * job.share) * SAMPLES
    samples, seed = [], (job.seed * 1000 + step) * len(tasks)
    for of_part, weights, first in ((tasks[:cut], stale, 0), (tasks[cut:], fresh, cut)):
        if of_part:
            sampler.engine.load_weights(*weights)
            samples += sampler.sample(of_part, seed=seed + first)
    return Batch(step, [samples[first : first + SAMPLES] for first in range(0, len(samples), SAMPLES)])


def start(policy: Path, held_out: int) -> float:
    """Held-out accuracy of the policy that every run starts from."""
    torch.set_num_threads(1)
    sampler = Sampler(policy)
    sampler.engine.load_weights(Version(0, 0), load_folder_weights(policy))
    return sampler.held_out(held_out)


def rows_of(outcomes: list[Outcome], started: float) -> list[Row]:
    """Held-out accuracy by correction and staleness, and how far below the same seed's on-policy run it is."""
    found = {(o.job.name, o.job.staleness, o.job.seed): o.held_out for o in outcomes}
    on_policy = {o.job.seed: o.held_out for o in outcomes if o.job.staleness == 0 and o.job.name != LORA}
    rows = [Row("heldout_start", [started], "accuracy")]
    for name, staleness in dict.fromkeys((o.job.name, o.job.staleness) for o in outcomes):
        if name == PPO:
            rows += rows_of_ppo([o for o in outcomes if o.job.name == PPO], on_policy, started)
            continue
        seeds = [seed for n, k, seed in found if (n, k) == (name, staleness)]
        label = f"staleness_{staleness}" if name == "default" else f"{name}_staleness_{staleness}"
        label = LORA if name == LORA else label
        reached = [found[name, staleness, seed] for seed in seeds]
        rows.append(Row(f"heldout_{label}", reached, "accuracy", of=fmean))
        if (staleness or name == LORA) and on_policy:
            gaps = [on_policy[seed] - at for seed, at in zip(seeds, reached, strict=True)]
            gap = "lora_heldout_gap" if name == LORA else f"heldout_gap_{label}"
            rows.append(Row(gap, gaps, "accuracy", of=fmean))
        if staleness == max(LEVELS):
            rows.append(Row(f"seeds_below_start_{label}", [sum(at < started for at in reached)], "seeds"))
    return rows


def rows_of_ppo(outcomes: list[Outcome], on_policy: dict[int, float], started: float) -> list[Row]:
    """How far below the same seed's on-policy GRPO it ends."""
    gaps = [on_policy[o.job.seed] - o.held_out for o in outcomes]
    stale = [o.metrics["off_policy_share"] for o in outcomes]
    return [
        Row("heldout_ppo", [o.held_out for o in outcomes], "accuracy", of=fmean),
        Row("ppo_heldout_gap", gaps, "accuracy", of=fmean),
        Row("ppo_stale_tokens", stale, "share", of=fmean),
        Row("ppo_seeds_below_start", [sum(o.held_out < started for o in outcomes)], "seeds"),
    ]


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--all", action="store_true", help="every correction, hours on two cores")
    arguments.add_argument("--ppo", action="store_true", help="PPO with stale tokens against on-policy GRPO, alone")
    arguments.add_argument("--lora", action="store_true", help="an adapter against the whole model, on-policy, alone")
    arguments.add_argument("--only", nargs="+", choices=CORRECTIONS, metavar="NAME", help="these corrections")
    arguments.add_argument(
        "--levels", nargs="+", type=int, default=LEVELS, metavar="K", help="these levels of staleness"
    )
    arguments.add_argument("--seeds", nargs="+", type=int, default=range(5), metavar="N", help="these seeds")
    arguments.add_argument("--set", default="{}", metavar="JSON", help="further keys of [algorithm]")
    arguments.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs side by side")
    arguments.add_argument(
        "--runs", type=Path, metavar="FILE", help="each run is a line of JSON there, and none that it has is run again"
    )
    options = arguments.parse_args()
    steps, held_out = (3, 64) if options.quick else (STEPS, HELD_OUT)
    levels, seeds = ((0, 2), range(1)) if options.quick else (options.levels, options.seeds)
    policy = make_policy(ROOT / "cache/policy", log=lambda line: print(line, file=sys.stderr))
    names = options.only or (list(CORRECTIONS) if options.all else ["default"])
    jobs = [
        Job(name, staleness, seed, steps, held_out, policy, orjson.loads(options.set))
        for seed in seeds
        for name in names
        for staleness in levels
        if staleness or name == names[0]
    ]
    if options.ppo:
        lag, share = STALE
        jobs = [
            job
            for seed in seeds
            for job in (
                Job("default", 0, seed, steps, held_out, policy),
                Job(PPO, lag, seed, steps, held_out, policy, share=share),
            )
        ]
    if options.lora:
        jobs = [Job(name, 0, seed, steps, held_out, policy) for seed in seeds for name in ("default", LORA)]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        started = pool.submit(start, policy, held_out)
        outcomes = known_outcomes(options.runs, jobs)
        over = [outcome.job for outcome in outcomes]
        for outcome in pool.map(train, [job for job in jobs if job not in over]):
            outcomes.append(outcome)
            log(outcome, options.runs)
        outcomes.sort(key=lambda outcome: jobs.index(outcome.job))
        report(rows_of(outcomes, started.result()), options.json)


def facts(job: Job) -> dict:
    """What tells a run from others: everything that it depends on but the code."""
    config = configuration(job, Path("runs"))
    weights = crc32((job.policy / "model.safetensors").read_bytes())
    told = {"name": job.name, "staleness": job.staleness, "seed": job.seed, "policy": weights}
    told |= {"algorithm": config.algorithm.model_dump(mode="json"), "learner": config.learner.model_dump(mode="json")}
    if job.name == PPO:
        told |= {"critic": config.critic.model_dump(mode="json"), "share": job.share}
    if job.name == LORA:
        told |= {"lora": config.lora.model_dump(mode="json")}
    return told | {"steps": job.steps, "prompts": job.held_out}


def known_outcomes(path: Path | None, jobs: list[Job]) -> list[Outcome]:
    """Those of the jobs whose outcome `log` has written before."""
    lines = read_runs(path)
    return [
        Outcome(job, line["held_out"], line["rewards"], line["metrics"])
        for job in jobs
        for line in lines
        if facts(job).items() <= line.items()
    ]


def log(outcome: Outcome, path: Path | None) -> None:
    job = outcome.job
    print(f"{job.name}, staleness {job.staleness}, seed {job.seed}: held out {outcome.held_out:.4f}", file=sys.stderr)
    found = {"held_out": outcome.held_out, "rewards": outcome.rewards, "metrics": outcome.metrics}
    write_run(path, facts(job) | found)


if __name__ == "__main__":
    main()
