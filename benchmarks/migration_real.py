"""What `schedule.migrate` brings on the torch engine: two workers, a core for each, and turns with it and without."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import contextlib
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean

import msgspec
import torch
import torch.distributed as dist
from common import Row
from forced_worker import Reading
from pinned_engine import ROOT, PinnedEngine
from rollout_real import UNKNOWN, made
from rollout_turn import Failed, Watch, WatchedSource, process, wait_for_address
from timed_learner import TimedTrainer, consume

from april import config as configuration
from april.config import WeightsSection
from april.report.run_folder import read_records
from april.simulate.scenario import load_scenario
from april.weights.publisher import WeightPublisher

WORKERS = 2
GROUPS, GROUP_SIZE = 4, 8
LONGEST = 3276
SETTING = f"""
[lengths]
median_tokens = 900
sigma_between = 0.6
sigma_within = 0.35
longest_tokens = {LONGEST}
prompt_tokens = 8
[learner]
token_s = 1e-6
[schedule]
kind = "sync"
rollout_batch_size = {GROUPS}
n_samples_per_prompt = {GROUP_SIZE}
[engines]
count = {WORKERS}
slots = {GROUPS * GROUP_SIZE}
"""
"""The published one (`configs/published.toml`) with responses a fifth as long and fewer of them."""


def measure(seeds: range, steps: int) -> tuple[list[Row], dict]:
    """Two workers, each bound to a core, the second one's shared with all else; turns with and without in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="april-migration-") as place, contextlib.closing(
        PinnedEngine("torch", Path(place), GROUPS * GROUP_SIZE, LONGEST)
    ) as engine:  # fmt: skip
        for seed in seeds:
            for migrate in (False, True) if seed % 2 == 0 else (True, False):
                folder = made(Path(place) / f"seed-{seed}-{migrate}")
                times, moved = turn(engine, folder, seed, steps, migrate)
                found[migrate].append((mean(times), moved))
                said = f"a batch {mean(times):.2f} s, {moved} moves, load {os.getloadavg()[0]:.1f}"
                print(f"  seed {seed}, {'with' if migrate else 'without'}: {said}", file=sys.stderr, flush=True)
    pairs = list(zip(found[False], found[True], strict=True))
    rows = [
        Row("migration_gain_torch", [without / with_it - 1 for (without, _), (with_it, _) in pairs], "fraction"),
        Row("migration_batch_s_torch", [with_it for _, (with_it, _) in pairs], "s"),
        Row("migration_batch_s_torch_without", [without for (without, _), _ in pairs], "s"),
        Row("migration_moves_torch", [moved / steps for _, (_, moved) in pairs], "samples a batch"),
    ]
    return rows, {}


def turn(engine: PinnedEngine, folder: Path, seed: int, steps: int, migrate: bool) -> tuple[list[float], int]:
    """Seconds between two batches, behind the first; and how many samples moved meanwhile."""
    (folder / "setting.toml").write_text(SETTING + UNKNOWN)
    keys = {"seed": seed, "steps": steps, "warmup_steps": 1, "schedule.migrate": migrate}
    scenario = load_scenario(folder / "setting.toml", list(keys.items()))
    config = configuration.load(engine.write_run(folder, scenario))
    trainer = TimedTrainer(config, scenario.learner, scenario.first_measured, steps)
    with contextlib.ExitStack() as parts:
        broker = parts.enter_context(process(["-m", "april.cli", "broker", folder / "run.toml"], folder / "broker.log"))
        address = wait_for_address(config, broker)
        publisher = WeightPublisher(WeightsSection(), "run", "cpu")
        parts.callback(publisher.close)
        written, watched = engine.write_scenario(folder, scenario), {folder / "broker.log": broker}
        for place, core in enumerate([engine.core, *sorted(engine.others)][:WORKERS]):
            command = [ROOT / "benchmarks/forced_worker.py", folder / "run.toml", "--connect", address]
            command += ["--name", f"w{place}", "--scenario", written, "--gauge", folder / f"gauge-{place}.jsonl"]
            log = folder / f"worker-{place}.log"
            watched[log] = parts.enter_context(process([*command, "--core", core], log))
        source = WatchedSource(address, publisher.address, Watch(watched))
        parts.callback(source.close)
        consume(config, trainer, source, publisher)
    for gauge in sorted(folder.glob("gauge-*.jsonl")):
        if not msgspec.json.decode(gauge.read_bytes().splitlines()[-1], type=Reading).generated:
            raise Failed(f"a worker has generated nothing, which leaves nothing to compare; {gauge}")
    instants = [trainer.began, *(one.at for one in trainer.measured)]
    records = read_records(config.run_dir / "metrics.jsonl")[scenario.first_measured :][:steps]
    moved = sum(record["round"]["moved_samples"] for record in records)
    return [until - since for since, until in pairwise(instants)], moved
