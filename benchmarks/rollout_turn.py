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
from core_time import CoreTime
from forced_worker import Reading
from pinned_engine import ROOT, TURN_S, PinnedEngine
from timed_learner import Counted, RealTrainer, TimedTrainer, consume
from watcher import Watcher

from april import config as configuration
from april import wire
from april.broker.telemetry.recorder import describe_ages
from april.config import Config, WeightsSection
from april.learner.source import BrokerSource
from april.observe.operate import content
from april.observe.report.run_folder import read_records
from april.simulate.scenario import Scenario
from april.weights.publisher import WeightPublisher
from april.wire.sockets.broker import BrokerConnection
from april.workers.engines.sglang.server import die_with_parent

START_S = 60.0
"""longest start of the broker"""
END_S = 10.0


class Failed(RuntimeError):
    """A part of the run has ended, or nothing goes on; its log is named."""


@dataclass(frozen=True)
class Turn:
    """A schedule's figures behind the warm-up; names as in `april.simulate.measures.Measures`."""

    scenario: Scenario
    time_s: float
    """without that in which strangers had the engine's core, which is left out everywhere"""
    step_times_s: list[float]
    """between two batches"""
    taken: float
    """share of the wall time for which the engine's core was somebody else's"""
    consumed: int
    """tokens"""
    rollout_s: float
    trainer: Counted
    generated: int
    discarded: int
    recomputed: int
    ages: Counter
    leased: float
    """samples, mean over time"""
    busy: float
    """samples in the engine, mean over time"""
    updating: float
    """of these the ones that stand still while weights are taken in"""
    buffer_peak_tokens: int

    @property
    def consumed_per_s(self) -> float:
        return self.consumed / self.time_s

    @property
    def consumed_per_rollout_s(self) -> float:
        return self.consumed / self.rollout_s

    @property
    def kept_per_s(self) -> float:
        """Tokens generated and not dropped, whether or not the learner has had them yet."""
        return (self.generated - self.discarded) / self.time_s

    @property
    def idle_share(self) -> dict[str, float]:
        """Slots that the schedule wants to fill: not leased (barrier or admission), without the sample that is leased
        (pipeline), or standing still (update)."""
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


def run_turn(engine: PinnedEngine, scenario: Scenario, folder: Path, trains: bool = False) -> Turn:
    """Run the scenario's schedule for its warm-up and its steps; `trains`: a learner that does. Raises Failed."""
    config = configuration.load(engine.write_run(folder, scenario))
    counts = scenario.first_measured, scenario.steps
    trainer = RealTrainer(config, *counts) if trains else TimedTrainer(config, scenario.learner, *counts)
    with contextlib.ExitStack() as parts:
        broker = parts.enter_context(process(["-m", "april.cli", "broker", folder / "run.toml"], folder / "broker.log"))
        address = wait_for_address(config, broker)
        publisher = WeightPublisher(WeightsSection(), "run", "cpu")
        parts.callback(publisher.close)
        gauge = folder / "gauge.jsonl"
        command = [ROOT / "benchmarks/forced_worker.py", folder / "run.toml", "--connect", address, "--name", "w0"]
        command += ["--scenario", engine.write_scenario(folder, scenario), "--gauge", gauge]
        if engine.worker_core is not None:
            command += ["--core", engine.worker_core]
        worker = parts.enter_context(process(command, folder / "worker.log"))
        watch = Watch({folder / "broker.log": broker, folder / "worker.log": worker})
        source = WatchedSource(address, publisher.address, watch)
        parts.callback(source.close)
        looks = parts.enter_context(Looks(address))
        core = parts.enter_context(engine.core_time(worker.pid))
        consume(config, trainer, source, publisher)
    return make_turn(scenario, config, trainer, gauge, looks, core)


def make_turn(
    scenario: Scenario, config: Config, trainer: Counted, gauge: Path, looks: "Looks", core: CoreTime
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
    tokens = sum(one.tokens for one in measured)
    taken_s = core.taken(began, ended)
    instants = [began, *(one.at for one in measured)]
    step_times_s = [until - since - core.taken(since, until) for since, until in pairwise(instants)]
    return Turn(
        scenario=scenario,
        time_s=ended - began - taken_s,
        step_times_s=step_times_s,
        taken=taken_s / (ended - began),
        consumed=tokens,
        rollout_s=sum(step["rollout_s"] for step in steps) - taken_s,
        trainer=trainer,
        generated=round(grown["generated"]),
        discarded=discarded(steps[-1]) - discarded(before),
        recomputed=round(grown["recomputed"]),
        ages=ages,
        leased=looks.mean(began, ended),
        busy=grown["busy_slot_s"] / (ended - began),
        updating=grown["update_slot_s"] / (ended - began),
        buffer_peak_tokens=orjson.loads((config.run_dir / "summary.json").read_bytes())["buffer_peak"]["tokens"],
    )


def growth(readings: list[Reading], name: str, began: float, ended: float) -> float:
    """Of a sum between two instants."""
    values = np.interp([began, ended], [one.at for one in readings], [getattr(one, name) for one in readings])
    return float(values[1] - values[0])


def discarded(record: dict) -> int:
    return sum(record["tokens_ledger"]["discarded"].values())


# --- the parts ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(command: list, log: Path):
    """A Python process, asked to end on the way out and killed if it does not, or if this one is killed."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, *map(str, command)], stdout=output, stderr=output, cwd=ROOT, preexec_fn=die_with_parent
        )
    try:
        yield started
    finally:
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(END_S)
        started.kill()
        started.wait()


def wait_for_address(config: Config, broker: subprocess.Popen) -> str:
    path, deadline = config.run_dir / "address", time.monotonic() + START_S
    while not path.exists():
        if broker.poll() is not None or time.monotonic() > deadline:
            raise Failed(f"no broker; see {config.run_dir.parent / 'broker.log'}")
        time.sleep(0.02)
    return path.read_text()


class Watch:
    def __init__(self, processes: dict[Path, subprocess.Popen]):
        self.processes, self.deadline = processes, time.monotonic() + TURN_S

    def check(self) -> None:
        for log, one in self.processes.items():
            if one.poll() is not None:
                raise Failed(f"a part has ended with status {one.returncode}; {log}:\n{log.read_text()[-2000:]}")
        if time.monotonic() > self.deadline:
            raise Failed(f"a turn takes longer than {TURN_S:g} s")


class WatchedSource(BrokerSource):
    """Waits for a batch only while there is somebody to make it."""

    def __init__(self, address: str, weights_address: str, watch: Watch):
        super().__init__(address, weights_address, TURN_S)
        self.watch = watch

    def alive(self) -> None:
        super().alive()
        self.watch.check()


class Looks(Watcher):
    """Asks the broker again and again how many training samples are leased."""

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
