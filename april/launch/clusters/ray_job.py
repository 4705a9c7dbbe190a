"""The program of a Ray job: `python -m april.launch.clusters.ray_job PLAN`.

A placement group reserves what broker and learner need. An actor holds each part, and Ray starts it again where it or
its node dies. How many workers are wanted, and whether the run is to stop, is read in the run's folder.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import ray
import yaml
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from april.files.replace import replace_file
from april.launch.clusters.ray import REPORT
from april.launch.part import LEAVE_S, OVER
from april.processes.lifetime import end_with_parent

LOOK_S = 0.5
AGAIN_S = 2.0
"""before a part that has died is started again"""
BROKER, WORKER = "broker", "worker"
BROKER_CORES = 1


class Part:
    """An actor that holds one part. Where that dies, so does the actor, and Ray starts it again."""

    def __init__(self, name: str, script: str, environment: Mapping[str, str], logs: str):
        self.script, self.log = script, Path(logs) / f"{name}.log"
        self.host = ray.util.get_node_ip_address()
        self.environment = {**os.environ, **environment, "NAME": name, "HOST": self.host}
        self.leaving = False
        self.child: subprocess.Popen | None = None

    def hold(self) -> int:
        """Exit status of a part that is not to be started again."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                ["bash", "-c", self.script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                preexec_fn=end_with_parent,
            )
        status = self.child.wait()
        if status in OVER or self.leaving:
            return status
        time.sleep(AGAIN_S)
        os._exit(1)

    def where(self) -> str:
        return f"{self.host}, process {self.child.pid}" if self.child else self.host

    def leave(self) -> None:
        self.leaving = True
        if self.child:
            self.child.send_signal(signal.SIGTERM)


class Job:
    """All parts of a run. `run()` gives the broker's exit status."""

    def __init__(self, plan: Mapping[str, Any], folder: Path):
        self.plan, self.folder = plan, folder
        self.actors: dict[str, Any] = {}
        self.held: dict[Any, str] = {}
        """names of parts that have not come to their end, by the promise of their status"""
        self.statuses: dict[str, int] = {}
        self.places: dict[str, str] = {}
        self.asked: dict[Any, str] = {}
        """names of parts by the promise of their place"""
        self.stopping = False
        self.left: set[str] = set()
        """workers that were asked to leave"""

    def run(self) -> int:
        self.start_fixed()
        while BROKER not in self.statuses:
            self.follow(orjson.loads(Path(self.plan["orders"]).read_bytes()))
            self.look(LOOK_S)
        leave_by = time.monotonic() + LEAVE_S
        while self.held and time.monotonic() < leave_by:
            self.look(LOOK_S)
        return self.statuses[BROKER]

    def start_fixed(self) -> None:
        """The broker, the learner, and what is not scaled; the learner's first node is the broker's."""
        learner = self.plan["learner"]
        first = learner["needs"] | {"CPU": learner["needs"]["CPU"] + BROKER_CORES}
        bundles = [first] + [learner["needs"]] * (learner["nodes"] - 1)
        group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
        self.start(BROKER, self.plan["broker"]["script"], {"CPU": BROKER_CORES}, on=(group, 0))
        for node in range(learner["nodes"]):
            name = f"learner-{node}" if learner["nodes"] > 1 else "learner"
            self.start(name, learner["script"], learner["needs"], {"NODE": str(node)}, on=(group, node))
        for role, part in self.plan["holders"].items():
            for index in range(part["count"] if role != WORKER else 0):
                self.start(f"{role}-{index}", part["script"], part["needs"])

    def start(
        self,
        name: str,
        script: str,
        needs: Mapping[str, float],
        environment: Mapping[str, str] | None = None,
        on: tuple[Any, int] | None = None,
    ) -> None:
        """An actor that needs so much; `on`: a bundle of a placement group."""
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "memory": needs.get("memory", 0)}
        if on:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(on[0], placement_group_bundle_index=on[1])
        kind = ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=3)(Part)
        actor = kind.options(**options).remote(name, script, dict(environment or {}), f"{self.plan['run']}/logs")
        self.actors[name] = actor
        self.held[actor.hold.remote()] = name
        self.asked[actor.where.remote()] = name

    def follow(self, orders: Mapping[str, Any]) -> None:
        """Stop, or have as many workers as is wanted."""
        living = [name for name in self.held.values() if name.startswith(f"{WORKER}-")]
        if orders["stop"] and BROKER not in self.places:
            sys.exit("the run was stopped before there was a place for it")
        if orders["stop"] and not self.stopping:
            self.stopping = True
            for name in (BROKER, *living):
                self.actors[name].leave.remote()
        if self.stopping:
            return
        staying = [name for name in living if name not in self.left]
        for name in staying[orders[WORKER] :]:
            self.left.add(name)
            self.actors[name].leave.remote()
        part = self.plan["holders"].get(WORKER)
        for _ in range(orders[WORKER] - len(staying)):
            index = sum(name.startswith(f"{WORKER}-") for name in self.actors)
            self.start(f"{WORKER}-{index}", part["script"], part["needs"])

    def look(self, wait_s: float) -> None:
        """Who has come to an end, and where the others are."""
        ended, _ = ray.wait(list(self.held), timeout=wait_s)
        for promise in ended:
            name = self.held.pop(promise)
            self.statuses[name] = ray.get(promise)
            ray.kill(self.actors[name])
        answered, _ = ray.wait(list(self.asked), num_returns=len(self.asked), timeout=0) if self.asked else ([], [])
        for promise in answered:
            name = self.asked.pop(promise)
            if name not in self.statuses:
                self.places[name] = ray.get(promise)
                self.asked[self.actors[name].where.remote()] = name
        replace_file(self.folder / REPORT, "".join(self.lines()).encode())

    def lines(self) -> list[str]:
        return [
            f"{name:12} {self.places.get(name, 'waits for a place')}"
            + (f", has ended with status {self.statuses[name]}\n" if name in self.statuses else "\n")
            for name in self.actors
        ]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    ray.init(log_to_driver=False)
    sys.exit(Job(yaml.safe_load(path.read_text()), path.parent).run())
