"""The claim on one GPU: `sync`, `april` and `continuous` with forced long-tailed lengths, and what the simulator says.

Each schedule is a real run (`april run`: broker, worker with the torch engine, learner with FSDP) with the same prompts
and lengths: lognormal with σ = 1, median 512, cut at 8,192. Both are scaled down together if the runs would not fit the
time that is left, and every run gets its share of it. The model is small, so that a response of 8,192 tokens takes
seconds, and its learner attends by PyTorch's kernels. Engine and learner share the card by divided memory, then in
turns. Starting takes some time, so all runs are started together, and each waits in its engine until it is let go; its
cache has then grown and its graphs are captured, as in a run that has lasted.

The engine's cost model is fitted as `april calibrate` does, before the first run. The worker's own time for a step and
for a sample, the learner's time for a token, and the time from a batch to its weights in the engine are those of
`sync`, where nothing else runs beside them. Under `continuous` the learner trains while the engine generates, and two
processes share the card's time: the learner is taken to need twice its time, and the engine to be slower by as much as
the learner needs alone.
"""

import inspect
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from part import BENCHMARKS, QWEN3_SHAPES, Part, make_model  # puts april and the harness on sys.path

from common import APRIL, ROOT, read_lines, write_lines  # isort: skip
from forced_engine import GATE, GAUGE, WAITS  # isort: skip

import torch  # isort: skip
from april.learner.policy.arithmetic import build_tokenizer  # isort: skip
from april.observe.report.run_folder import read_records  # isort: skip
from april.config.costs import EngineCost  # isort: skip
from april.simulate.calibrate import COSTS, Fit, fit, measure  # isort: skip
from april.simulate.pipeline import simulate  # isort: skip
from april.simulate.probe import probe_of  # isort: skip
from april.simulate.scenario import Scenario  # isort: skip
from april.simulate.variants import no_barrier_limit  # isort: skip
from april.weights import TRANSPORTS  # isort: skip
from april.workers.engines.embedded.engine import TorchEngine  # isort: skip


@dataclass(frozen=True)
class Size:
    """How large the runs are."""

    shape: dict
    """Keys of the model's config.json."""
    groups: int
    """Groups of a batch, of 8 samples; `april` opens twice as many in a round."""
    slots: int
    """As many as a batch has samples."""
    median: int
    longest: int
    """Median response, and where responses are cut (tokens)."""
    prompt: int
    """Prompt of each sample (tokens)."""


SAMPLES, STALENESS = 8, 8
SPREADS = {"sigma_between": 0.86, "sigma_within": 0.51}
"""Of the log length, between prompts and within a group: together 1."""
CARD = Size(
    QWEN3_SHAPES["0.6B"] | {"num_hidden_layers": 4, "vocab_size": 8192}, 16, 128, median=512, longest=8192, prompt=64
)
TINY = Size(QWEN3_SHAPES["tiny"], 4, 32, median=32, longest=512, prompt=16)
SCALES = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""By which median and cut are scaled: the largest for which all runs fit into the time that is left."""
ROUNDS = {"sync": 3.2, "continuous": 3.0, "april": 3.5}
"""Least time of a run, in times of its longest response; more is divided in the same proportion."""
SHARES = (1 / 64, 1 / 8, 1 / 2, 1)
"""Running sequences of the loads that are timed for the cost model, as shares of the slots."""
LEARNER_KEYS = ("gather_s", "canary_s", "publish_s", "wait_s", "turn_wait_s", "turn_move_s")
"""Means of these of the learner's metrics are kept."""
RUNS = (("sync", False), ("continuous", False), ("april", False), ("sync", True), ("april", True))
"""(schedule, whether engine and learner take turns), by worth. `continuous` cannot: it generates while it trains."""
TINY_RUNS = (("sync", False), ("continuous", False), ("april", True))
ENOUGH_S = ((75, 5), (50, 3), (30, 2), (-1, 1))
"""(seconds that have to be left, number of RUNS that are then started)"""
LEAST_S, BUILD_S, START_S, MEASURING_S = 4.0, 3.0, 60.0, 8.0
"""Least time of a run, time to build its engine, longest start of all runs, and what is then kept for measuring them
(seconds)."""
SHORT_S = 40.0
"""With fewer seconds left, the cost model is fitted while the runs start, which disturb it."""
GUESSED_S = 5e-3
"""Seconds of a decode step, by which lengths are scaled if no cost model could be fitted."""
OVERTIME = 1.3
"""A run that has not been measured over two steps may take so many times its share."""
LOOK_S = 0.05
WEIGHTS = '[weights]\ntransport = "shared_memory"' if "shared_memory" in TRANSPORTS.shipped else ""
"""New weights stay on the machine, where April has such a lane."""
PREFILL_TOKENS = inspect.signature(TorchEngine).parameters["prefill_tokens"].default
END_S = 3.0
"""Kept for the end (seconds)."""
LEARNER_READY = "the learner is connected"
"""What `april run` prints then."""
CONFIG = """
[run]
name = "{name}"
dir = "{folder}"
[model]
path = "{policy}"
[data]
path = "{prompts}"
epochs = 1000000
[reward]
name = "benchmark_verifiers:coin"
[schedule]
kind = "{kind}"
rollout_batch_size = {groups}
n_samples_per_prompt = {samples}
max_staleness = {staleness}
max_steps = 1000000
{dial}
[sampling]
max_response_tokens = {longest}
[devices]
share = true
turns = {turns}
{memory}
{weights}
[worker]
engine = "forced_engine:Entry"
count = 1
slots = {slots}
device = "{device}"
[learner]
ranks = 1
device = "{device}"
microbatch_tokens = 16384
checkpoint_every = 1000000
[samples]
every = 0
"""


def main() -> None:
    part = Part.from_command_line(__doc__.partition("\n")[0])
    size = TINY if part.tiny else CARD
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="april-claim-", dir=shared if shared.is_dir() else None) as made:
        folder, runs = Path(made), []
        policy, prompts = make_inputs(folder, size, part.device.type)
        most = next(count for seconds, count in ENOUGH_S if part.left_s > seconds)
        wanted = TINY_RUNS if part.tiny else RUNS[:most]
        try:
            runs = [Run(part, folder, policy, prompts, size, *each) for each in wanted]
            with part.attempt("claim"):
                compare(part, size, runs, policy)
        finally:
            for run in runs:
                run.end()


def make_inputs(folder: Path, size: Size, device: str) -> tuple[Path, Path]:
    """A policy with random weights and prompts of equal length; returns both paths."""
    QWEN3_SHAPES["claim"] = size.shape
    policy = make_model(folder / "policy", "claim", torch.bfloat16, size.longest + size.prompt, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(policy)
    rows = [{"prompt": f"{number:0{size.prompt}d}", "label": ""} for number in range(4096)]
    return policy, write_lines(folder / "prompts.jsonl", rows)


class Run:
    """One run, started at once; its engine waits for `begin`."""

    def __init__(self, part: Part, folder: Path, policy: Path, prompts: Path, size: Size, kind: str, turns: bool):
        self.size, self.kind, self.turns = size, kind, turns
        self.name = f"{kind}{'_turns' * turns}"
        self.folder, self.log = folder / self.name, folder / f"{self.name}.log"
        dials = {"april": {"over_sampling_batch_size": 2 * size.groups}, "continuous": {"in_flight": size.slots}}
        self.dial: dict[str, int] = dials.get(kind, {})
        memory = ""
        if part.device.type == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            memory = f"memory_gib = {total * 0.8 / 2**30:.1f}"  # the other runs hold the rest
        dial = "".join(f"{key} = {value}" for key, value in self.dial.items())
        values = {
            "name": self.name, "folder": folder, "policy": policy, "prompts": prompts, "kind": kind,
            "groups": size.groups, "samples": SAMPLES, "staleness": STALENESS, "dial": dial,
            "longest": size.longest, "turns": str(turns).lower(), "slots": size.slots, "memory": memory,
            "weights": WEIGHTS, "device": part.device.type,
        }  # fmt: skip
        config = folder / f"{self.name}.toml"
        config.write_text(CONFIG.format(**values))
        # flash-attn-4 would compile for ten seconds in each learner: an empty package hides it.
        (hidden := folder / "without" / "flash_attn").mkdir(parents=True, exist_ok=True)
        (hidden / "__init__.py").touch()
        folders = [str(hidden.parent), str(BENCHMARKS / "gpu"), str(BENCHMARKS), str(ROOT)]
        folders += filter(None, [os.environ.get("PYTHONPATH")])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*APRIL, "run", str(config)], stdout=log, stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)}, cwd=folder,
            )  # fmt: skip

    @property
    def waits(self) -> bool:
        """Whether its learner has loaded the model, and its engine waits to be let go, or has been."""
        return (self.folder / WAITS).exists() and LEARNER_READY in self.log.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def log_end(self) -> str:
        """The last lines of its output and of its parts' logs."""
        logs = [self.log, *sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-900:]}" for log in logs)

    def begin(self, lengths: dict) -> None:
        """Let the engine go."""
        unfinished = self.folder / f"{GATE}.partial"
        unfinished.write_bytes(orjson.dumps(lengths))
        unfinished.rename(self.folder / GATE)
        self.began = time.time()

    @property
    def steps(self) -> list[dict]:
        return read_records(self.folder / "metrics.jsonl")

    def end(self) -> None:
        """Kill it; its parts end with their parent."""
        self.process.kill()
        self.process.wait()


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A run between the ends of two of its steps."""

    steps: list[dict]
    """Records of its steps between the two."""
    first: int
    """Number of steps before."""
    seconds: float
    gauge: dict[str, float]
    """What the engine's sums have grown by."""

    @property
    def tokens(self) -> int:
        return sum(step["tokens"] for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def idle_share(self, slots: int) -> float:
        return 1 - self.gauge["busy_slot_s"] / (slots * self.seconds)

    @property
    def train_s(self) -> float:
        """Seconds for which the learner has trained."""
        return sum(step["learner"]["train_s"] for step in self.steps)

    @property
    def handover_s(self) -> float:
        """Seconds of a step in which neither the engine generates or loads weights, nor the learner trains."""
        others_s = self.gauge["running_s"] + self.gauge["load_s"] + self.train_s
        return max(0.0, self.seconds - others_s) / len(self.steps)

    @property
    def loop_s(self) -> float:
        """The worker's own seconds between two decode steps while the device waits, if no sample has ended."""
        return self.gauge["quiet_s"] / max(1.0, self.gauge["quiet_steps"])

    @property
    def sample_s(self) -> float:
        """The worker's own seconds for a sample that has ended, while the device waits."""
        more_s = self.gauge["after_end_s"] - self.loop_s * self.gauge["after_ends"]
        return max(0.0, more_s) / max(1.0, self.gauge["finished"])

    def summary(self) -> dict[str, float]:
        gauge, tokens = self.gauge, [step["tokens"] for step in self.steps]
        ages = [step["staleness"]["mean"] for step in self.steps]
        figures = {
            "steps": len(self.steps), "steps_before": self.first, "seconds": self.seconds,
            "generated_per_s": gauge["tokens"] / self.seconds, "decode_step_s": gauge["step_s"] / gauge["steps"],
            "loop_s": self.loop_s, "sample_s": self.sample_s, "load_s": gauge["load_s"] / max(1.0, gauge["loads"]),
            "train_s": self.train_s / len(self.steps), "handover_s": self.handover_s,
            "staleness": float(np.average(ages, weights=tokens)),
        }  # fmt: skip
        learner = {key: np.mean([step["learner"].get(key, 0.0) for step in self.steps]).item() for key in LEARNER_KEYS}
        return {key: float(f"{value:.4g}") for key, value in (figures | learner).items()}


def watch(run: Run, lengths: dict, seconds: float, last_s: float, warm_s: float) -> Measured:
    """Let a run go for so many seconds from when its engine is built, and longer until it has been measured over two
    steps, but no longer than `last_s`. The first step, and those of the first `warm_s`, are not measured."""
    run.begin(lengths)
    built = None
    while built is None or time.time() < built + seconds or len(run.steps) < 3:
        if built is None and (run.folder / GAUGE).exists():
            built = time.time()
        if time.time() > run.began + last_s:
            break
        if run.ended:
            raise RuntimeError(f"{run.name} has ended:\n{run.log_end()}")
        time.sleep(LOOK_S)
    records = run.steps
    run.end()
    if len(records) < 2:
        raise RuntimeError(f"{len(records)} steps in {time.time() - run.began:.0f} s:\n{run.log_end()}")
    warm = sum(record["time"] < run.began + warm_s for record in records)
    first = max(1, min(warm, len(records) // 2))
    begin, end = records[first - 1]["time"], records[-1]["time"]
    lines = read_lines(run.folder / GAUGE)
    times = [line["at"] for line in lines]
    gauge = {key: np.diff(np.interp([begin, end], times, [line[key] for line in lines])).item() for key in lines[0]}
    return Measured(records[first:], first, end - begin, gauge)


def compare(part: Part, size: Size, started: list[Run], policy: Path) -> None:
    """Fit the cost model, measure the runs one after the other, and record what the simulator says of each."""
    runs, fitted, is_short = started, None, part.left_s < SHORT_S and not part.tiny
    if not is_short:
        runs = await_engines(part, started)
    with part.attempt("cost model"):
        fitted = calibrate(part, size, policy)
    if is_short:
        runs = await_engines(part, started)
    cost = (
        fitted.cost if fitted else EngineCost(decode_base_s=GUESSED_S, decode_running_s=0, decode_kv_s=0, prefill_s=0)
    )
    longest_s = cost.steps_s(size.longest, size.slots // 8, size.slots // 8 * size.median)
    wanted_s = longest_s * sum(ROUNDS[run.kind] for run in runs)
    most_s = part.left_s - END_S - BUILD_S * len(runs)
    scale = next((scale for scale in SCALES if part.tiny or scale * wanted_s <= most_s), SCALES[-1])
    lengths = {
        "family": "lognormal", "median_tokens": size.median * scale, "longest_tokens": round(size.longest * scale),
        "prompt_tokens": size.prompt, **SPREADS,
    }  # fmt: skip
    part.fact("claim: model, batch, slots", [size.shape, f"{size.groups} x {SAMPLES}", size.slots])
    part.fact("claim: lengths", lengths)
    measured: dict[str, Measured] = {}
    errors: list[float] = []
    for number, run in enumerate(runs):
        if not part.enough_time(run.name, LEAST_S):
            continue
        with part.attempt(run.name):
            share = ROUNDS[run.kind] / sum(ROUNDS[other.kind] for other in runs[number:])
            share_s = LEAST_S + BUILD_S if part.tiny else share * (part.left_s - END_S)
            last_s = 30 * LEAST_S if part.tiny else min(part.left_s - 1, OVERTIME * share_s)
            warm_s = 0.0 if run.kind == "sync" else scale * longest_s
            found = measured[run.name] = watch(run, lengths, share_s - BUILD_S, last_s, warm_s)
            part.row(f"gpu_tokens_per_s_{run.name}", found.tokens_per_s, "tokens/s")
            part.row(f"gpu_idle_slots_{run.name}", found.idle_share(size.slots), "fraction")
            part.fact(f"{run.name}: measured", found.summary())
            alone = measured.get(f"sync{'_turns' * run.turns}") or measured["sync"]
            if run.kind != "sync":
                name = f"gpu_{run.kind}_vs_sync" + "_turns" * run.turns
                part.row(name, found.tokens_per_s / alone.tokens_per_s, "ratio")
            if fitted:
                errors.append(foretell(part, run, found, alone, scenario_of(run, found, alone, fitted, lengths)))
    if errors:
        part.row("gpu_prediction_error", max(map(abs, errors)), "ratio")


def foretell(part: Part, run: Run, found: Measured, alone: Measured, scenario: Scenario) -> float:
    """Record what the simulator says of a run; returns by how much its tokens/s are too many, as a share."""
    if run.kind == "continuous":
        limit = no_barrier_limit(scenario) / alone.tokens_per_s
        part.row("gpu_continuous_vs_sync_limit", limit, "ratio")
        scenario = beside_learner(scenario, alone.train_s / len(alone.steps))
    foretold = simulate(scenario)
    error = foretold.consumed_per_s / found.tokens_per_s - 1
    part.row(f"gpu_prediction_error_{run.name}", error, "ratio")
    figures = {"tokens_per_s": foretold.consumed_per_s, "idle_slots": 1 - foretold.occupancy}
    figures |= {f"idle_{cause}": share for cause, share in foretold.idle_share.items() if share}
    part.fact(f"{run.name}: simulated", {key: float(f"{value:.4g}") for key, value in figures.items()})
    part.fact(f"{run.name}: scenario", scenario.model_dump(mode="json", exclude_unset=True))
    return error


def await_engines(part: Part, started: list[Run]) -> list[Run]:
    """The runs whose engines wait to be let go, once all do or it has taken too long; the others are ended."""
    began, longest_s = time.monotonic(), 3 * START_S if part.tiny else min(START_S, part.left_s - MEASURING_S)
    runs = list(started)
    while not all(run.waits for run in runs) and time.monotonic() < began + longest_s:
        for run in [run for run in runs if run.ended]:
            runs.remove(run)
        time.sleep(LOOK_S)
    part.fact("claim: seconds until all engines waited", round(time.monotonic() - began, 2))
    for run in started:
        if run not in runs or not run.waits:
            part.fact(f"{run.name}: did not start", run.log_end())
            run.end()
    return [run for run in runs if run.waits]


def calibrate(part: Part, size: Size, policy: Path) -> Fit:
    """The engine's cost model, from fewer loads than `april calibrate` times."""
    loads = (64, 512, size.longest) if not part.tiny else (32, 128)
    keys = ["--worker.engine", "torch", "--worker.device", part.device.type]
    began = time.monotonic()
    with probe_of(policy, size.slots, keys) as (probe, name):
        fitted = fit(
            measure(probe, loads, SHARES, repeats=1), f"{name}, {size.slots} slots", probe.engine.kv_tokens, False
        )
    part.fact("claim: cost model", fitted.describe().splitlines())
    part.fact("claim: seconds of the fit", round(time.monotonic() - began, 2))
    return fitted


def scenario_of(run: Run, found: Measured, alone: Measured, fitted: Fit, lengths: dict) -> Scenario:
    """What is simulated of a run. `alone`: `sync`, shared the same way."""
    size, pause_s = run.size, alone.gauge["load_s"] / len(alone.steps)
    cost = fitted.cost.model_dump(exclude_unset=True)
    cost["decode_base_s"] += alone.loop_s
    cost["request_s"] += alone.sample_s
    schedule = {
        "kind": run.kind, "rollout_batch_size": size.groups, "n_samples_per_prompt": SAMPLES,
        "max_staleness": STALENESS, **run.dial,
    }  # fmt: skip
    tree = {
        "seed": 0, "limit_responses": 4000, "warmup_steps": found.first, "steps": len(found.steps),
        "schedule": schedule, "lengths": lengths, "cost": cost,
        "engines": {"count": 1, "slots": size.slots, "prefix_cache": False, "prefill_tokens": PREFILL_TOKENS},
        "learner": {"token_s": alone.train_s / alone.tokens},
        "weights": {"transfer_s": alone.handover_s, "pause_s": pause_s, "keep_kv": False},
    }  # fmt: skip
    return Scenario.model_validate(tree)


def beside_learner(scenario: Scenario, train_s: float) -> Scenario:
    """The scenario with an engine and a learner that share a card's time all the time. `train_s`: the learner's time
    for a batch, alone."""
    measures = simulate(scenario)
    slower = 1 + train_s * scenario.steps / measures.measured.time_s
    costs = {f"cost__{key}": slower * getattr(scenario.cost, key) for key in COSTS}
    return scenario.with_keys(learner__token_s=2 * scenario.learner.token_s, **costs)


if __name__ == "__main__":
    main()
