"""The program of a Ray job: `python -m april.launch.clusters.ray_job PLAN`.

A placement group reserves the resources of broker and learner. Each part runs in an actor, which Ray restarts if it or
its node dies. The wanted number of workers, and requests to stop, are read from the run folder.
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

from april.launch.part import LEAVE_S, OVER
from april.util.files import replace_file
from april.util.lifetime import end_with_parent

POLL_S = 0.5
RESTART_DELAY_S = 2.0
"""Delay before a dead part is restarted."""
BROKER, WORKER = "broker", "worker"
BROKER_CORES = 1


class RayPart:
    """Actor that runs one part. If the part dies, the actor exits, and Ray restarts it."""

    def __init__(self, name: str, script: str, environment: Mapping[str, str], logs: str):
        self.script, self.log = script, Path(logs) / f"{name}.log"
        self.host = ray.util.get_node_ip_address()
        self.environment = {**os.environ, **environment, "NAME": name, "HOST": self.host}
        self.is_stopping = False
        self.child: subprocess.Popen | None = None

    def run_part(self) -> int:
        """Run the part; returns its exit status if it must not be restarted, otherwise exits the actor."""
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
        if status in OVER or self.is_stopping:
            return status
        time.sleep(RESTART_DELAY_S)
        os._exit(1)

    def location(self) -> str:
        return f"{self.host}, process {self.child.pid}" if self.child else self.host

    def stop(self) -> None:
        self.is_stopping = True
        if self.child:
            self.child.send_signal(signal.SIGTERM)


class Job:
    """Starts and follows all parts of a run. `run()` returns the broker's exit status."""

    def __init__(self, plan: Mapping[str, Any]):
        self.plan = plan
        self.actors: dict[str, Any] = {}
        self.running: dict[Any, str] = {}
        """Running parts: Ray's reference to the exit status that is to come -> name of the part."""
        self.statuses: dict[str, int] = {}
        self.locations: dict[str, str] = {}
        self.location_requests: dict[Any, str] = {}
        """Parts whose location is not known yet: Ray's reference to the location to come -> name of the part."""
        self.stopping = False
        self.stopping_workers: set[str] = set()
        """Names of workers that were asked to stop."""

    def run(self) -> int:
        self.start_fixed()
        while BROKER not in self.statuses:
            self.apply_orders(orjson.loads(Path(self.plan["orders"]).read_bytes()))
            self.poll(POLL_S)
        leave_by = time.monotonic() + LEAVE_S
        while self.running and time.monotonic() < leave_by:
            self.poll(POLL_S)
        return self.statuses[BROKER]

    def start_fixed(self) -> None:
        """Start the broker, the learner, the scorers and the agents processes; the workers, whose number may change,
        are started elsewhere. The broker shares the learner's first node."""
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
        """Start the part `name`, a shell `script` with these environment variables, in an actor with the resources
        `needs` (Ray's names and amounts). `on`: (placement group, bundle index); None: anywhere."""
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "memory": needs.get("memory", 0)}
        if on:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(on[0], placement_group_bundle_index=on[1])
        kind = ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=3)(RayPart)
        actor = kind.options(**options).remote(name, script, dict(environment or {}), f"{self.plan['run']}/logs")
        self.actors[name] = actor
        self.running[actor.run_part.remote()] = name
        self.location_requests[actor.location.remote()] = name

    def apply_orders(self, orders: Mapping[str, Any]) -> None:
        """Carry out `orders`, the requests read from the run folder: "stop" (whether to), and the wanted number of
        workers."""
        alive = [name for name in self.running.values() if name.startswith(f"{WORKER}-")]
        if orders["stop"] and BROKER not in self.locations:
            sys.exit("the run was stopped before its resources were available")
        if orders["stop"] and not self.stopping:
            self.stopping = True
            for name in (BROKER, *alive):
                self.actors[name].stop.remote()
        if self.stopping:
            return
        remaining = [name for name in alive if name not in self.stopping_workers]
        for name in remaining[orders[WORKER] :]:
            self.stopping_workers.add(name)
            self.actors[name].stop.remote()
        part = self.plan["holders"].get(WORKER)
        for _ in range(orders[WORKER] - len(remaining)):
            index = sum(name.startswith(f"{WORKER}-") for name in self.actors)
            self.start(f"{WORKER}-{index}", part["script"], part["needs"])

    def poll(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds for a part to end. Note the exit statuses of ended parts and the locations of the
        others, and write the report."""
        ended, _ = ray.wait(list(self.running), timeout=wait_s)
        for reference in ended:
            name = self.running.pop(reference)
            self.statuses[name] = ray.get(reference)
            ray.kill(self.actors[name])
        answered, _ = (
            ray.wait(list(self.location_requests), num_returns=len(self.location_requests), timeout=0)
            if self.location_requests
            else ([], [])
        )
        for reference in answered:
            name = self.location_requests.pop(reference)
            if name not in self.statuses:
                self.locations[name] = ray.get(reference)
                self.location_requests[self.actors[name].location.remote()] = name
        replace_file(Path(self.plan["report"]), "".join(self.lines()).encode())

    def lines(self) -> list[str]:
        return [
            f"{name:12} {self.locations.get(name, 'waits for resources')}"
            + (f", has ended with status {self.statuses[name]}\n" if name in self.statuses else "\n")
            for name in self.actors
        ]


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    sys.exit(Job(yaml.safe_load(Path(sys.argv[1]).read_text())).run())
