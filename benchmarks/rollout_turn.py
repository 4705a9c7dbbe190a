"""One schedule on a real engine: broker and worker in processes of their own, the learner here, all measured."""

import contextlib
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import orjson
import torch
from common import APRIL, ROOT, process, wait_for
from core_time import CoreTime, Watcher
from forced_worker import Reading
from pinned_engine import TURN_S, PinnedEngine

from april import config as configuration
from april import wire
from april.broker.telemetry.recorder import describe_ages
from april.config import Config, WeightsSection
from april.learner import loop
from april.learner.batch import TrainingBatch
from april.learner.source import BrokerSource
from april.learner.trainer import Trainer
from april.observe.operate import content
from april.observe.report.run_folder import read_records
from april.simulate.scenario import LearnerCost, Scenario
from april.weights.publisher import WeightPublisher
from april.wire.sockets.broker import BrokerConnection
from april.workers.engines.sglang.server import die_with_parent

START_S = 60.0
"""Longest start of the broker (seconds)."""


class Failed(RuntimeError):
    """A part of the run has ended, or the turn takes too long."""


class Enough(Exception):
    """The measured batches have been trained."""


@dataclass(frozen=True)
class Trained:
    at: float
    """Monotonic time of its end (seconds)."""
    tokens: int
    """Response tokens of the batch."""


class TimedTrainer(Trainer):
    """A learner that waits in place of training, as long as a scenario's learner takes, and publishes real weights. It
    raises `Enough` behind the warm-up and `steps` batches more."""

    def __init__(self, config: Config, cost: LearnerCost, warmup_steps: int, steps: int):
        super().__init__(config, torch.device("cpu"))
        self.cost, self.warmup_steps, self.steps = cost, warmup_steps, steps
        self.trained: list[Trained] = []

    def prepare(self, batch: TrainingBatch) -> None:
        """Nothing has to be prepared for a wait."""

    def step(self, batch: TrainingBatch, ready: None) -> dict[str, float]:
        tokens = sum(sample.response_tokens for sample in batch.samples)
        time.sleep(self.cost.step_s + self.cost.token_s * tokens)
        self.trained.append(Trained(time.monotonic(), tokens))
        self.step_count += 1
        return {"loss": 0.0, "nonfinite": 0.0, "tokens": float(tokens)}

    def saved(self, wait: bool = False) -> None:
        """Save nothing; end after the last batch, which has been reported by now."""
        if len(self.trained) == self.warmup_steps + self.steps:
            raise Enough

    @property
    def measured(self) -> list[Trained]:
        """The batches behind the warm-up."""
        return self.trained[self.warmup_steps :]

    @property
    def began(self) -> float:
        """When the warm-up's last batch was trained (monotonic seconds)."""
        return self.trained[self.warmup_steps - 1].at


@dataclass(frozen=True)
class Turn:
    """A schedule's figures behind the warm-up, called as in `april.simulate.measures.Measures`. The time in which other
    work had the engine's core is left out of all times."""

    scenario: Scenario
    time_s: float
    step_times_s: list[float]
    """Times between two batches."""
    taken: float
    """Share of the wall time in which other work had the engine's core."""
    consumed: int
    """Trained tokens."""
    rollout_s: float
    generated: int
    discarded: int
    recomputed: int
    ages: Counter
    leased: float
    """Leased samples, mean over time."""
    busy: float
    """Samples in the engine, mean over time."""
    updating: float
    """Samples that stand still while weights are loaded, mean over time."""
    buffer_peak_tokens: int

    @property
    def consumed_per_s(self) -> float:
        return self.consumed / self.time_s

    @property
    def consumed_per_rollout_s(self) -> float:
        return self.consumed / self.rollout_s

    @property
    def kept_per_s(self) -> float:
        """Tokens generated and not dropped a second, whether or not they have been trained yet."""
        return (self.generated - self.discarded) / self.time_s

    @property
    def idle_share(self) -> dict[str, float]:
        """Shares of the slots that the schedule wants to fill: not leased (barrier or admission), without their leased
        sample (pipeline), or standing still (update)."""
        wanted = self.scenario.slots_wanted
        cause = "admission" if self.scenario.schedule.kind == "continuous" else "barrier"
        return {
            cause: max(0.0, 1 - self.leased / wanted),
            "pipeline": max(0.0, (self.leased - self.busy) / wanted),
            "update": self.updating / wanted,
        }

    @property
    def occupancy(self) -> float:
        return (self.busy - self.updating) / self.scenario.slots_wanted

    @property
    def staleness_mean(self) -> float:
        return describe_ages(self.ages)["mean"]

    @property
    def off_policy_share(self) -> float:
        return 1 - self.ages[0] / self.ages.total()


def run_turn(engine: PinnedEngine, scenario: Scenario, folder: Path) -> Turn:
    """Run the scenario's schedule for its warm-up and its steps. Raises Failed."""
    config = configuration.load(engine.write_run(folder, scenario))
    trainer = TimedTrainer(config, scenario.learner, scenario.first_measured, scenario.steps)
    started = {"cwd": ROOT, "preexec_fn": die_with_parent}
    with contextlib.ExitStack() as parts:
        broker_log, worker_log = folder / "broker.log", folder / "worker.log"
        broker = parts.enter_context(process([*APRIL, "broker", folder / "run.toml"], broker_log, **started))
        wait_for((config.run_dir / "address").exists, f"no broker, see {broker_log}", broker, START_S)
        address = (config.run_dir / "address").read_text()
        publisher = WeightPublisher(WeightsSection(), "run", "cpu")
        parts.callback(publisher.close)
        gauge = folder / "gauge.jsonl"
        command = [sys.executable, ROOT / "benchmarks/forced_worker.py", folder / "run.toml", "--connect", address]
        command += ["--scenario", engine.write_scenario(folder, scenario), "--gauge", gauge, "--name", "w0"]
        if engine.worker_core is not None:
            command += ["--core", engine.worker_core]
        worker = parts.enter_context(process(command, worker_log, **started))
        source = WatchedSource(address, publisher.address, {broker_log: broker, worker_log: worker})
        parts.callback(source.close)
        poller = parts.enter_context(LeasePoller(address))
        core = parts.enter_context(engine.core_time(worker.pid))
        with contextlib.suppress(Enough):
            loop.run(config, trainer, source, publisher)
            raise Failed(f"the run ended after {trainer.step_count} batches, before there was enough to measure")
    return make_turn(scenario, config, trainer, gauge, poller, core)


def make_turn(
    scenario: Scenario, config: Config, trainer: TimedTrainer, gauge: Path, poller: "LeasePoller", core: CoreTime
) -> Turn:
    first, began, measured = trainer.warmup_steps, trainer.began, trainer.measured
    ended = measured[-1].at
    records = read_records(config.run_dir / "metrics.jsonl")
    before, steps = records[first - 1], records[first : first + len(measured)]
    ages = Counter()
    for step in steps:
        ages.update({int(age): tokens for age, tokens in step["staleness"]["tokens_by_age"].items()})
    readings = msgspec.json.decode(
        b"[" + b",".join(gauge.read_bytes().splitlines()) + b"]", type=list[Reading]
    )  # fmt: skip
    grown = {name: growth(readings, name, began, ended) for name in Reading.__struct_fields__}
    tokens = sum(batch.tokens for batch in measured)
    taken_s = core.taken(began, ended)
    instants = [began, *(batch.at for batch in measured)]
    step_times_s = [until - since - core.taken(since, until) for since, until in pairwise(instants)]
    return Turn(
        scenario=scenario,
        time_s=ended - began - taken_s,
        step_times_s=step_times_s,
        taken=taken_s / (ended - began),
        consumed=tokens,
        rollout_s=sum(step["rollout_s"] for step in steps) - taken_s,
        generated=round(grown["generated"]),
        discarded=discarded(steps[-1]) - discarded(before),
        recomputed=round(grown["recomputed"]),
        ages=ages,
        leased=poller.mean(began, ended),
        busy=grown["busy_slot_s"] / (ended - began),
        updating=grown["update_slot_s"] / (ended - began),
        buffer_peak_tokens=orjson.loads((config.run_dir / "summary.json").read_bytes())["buffer_peak"]["tokens"],
    )


def growth(readings: list[Reading], name: str, began: float, ended: float) -> float:
    """How much a sum of the gauge has grown between two instants."""
    times, sums = [reading.at for reading in readings], [getattr(reading, name) for reading in readings]
    values = np.interp([began, ended], times, sums)
    return float(values[1] - values[0])


def discarded(record: dict) -> int:
    return sum(record["tokens_ledger"]["discarded"].values())


class WatchedSource(BrokerSource):
    """Waits for a batch as long as the processes that make it live, and no longer than a turn may take."""

    def __init__(self, address: str, weights_address: str, processes: dict[Path, subprocess.Popen]):
        super().__init__(address, weights_address, TURN_S)
        self.processes, self.deadline = processes, time.monotonic() + TURN_S

    def alive(self) -> None:
        super().alive()
        for log, running in self.processes.items():
            if running.poll() is not None:
                raise Failed(f"a part has ended with status {running.returncode}; {log}:\n{log.read_text()[-2000:]}")
        if time.monotonic() > self.deadline:
            raise Failed(f"a turn takes longer than {TURN_S:g} s")


class LeasePoller(Watcher):
    """Polls the broker for the number of leased training samples."""

    def __init__(self, address: str):
        super().__init__()
        self.address = address
        self.seen: list[tuple[float, int]] = []

    def _run(self) -> None:
        connection = BrokerConnection(self.address, "monitor", "benchmark", uuid.uuid4().hex, TURN_S)
        connection.hello(lease_ids=[])
        while not self._over():
            status = content(connection.request(wire.StatusRequest(), TURN_S))
            self.seen.append((time.monotonic(), status["leased"]))
        connection.goodbye()
        connection.close()

    def mean(self, began: float, ended: float) -> float:
        return float(np.mean([leased for at, leased in self.seen if began <= at <= ended]))
