"""Ray: one job whose program places the parts, each held by an actor, and which Ray restarts."""

import re
import shlex
import sys

import yaml

from april.config import ConfigError
from april.launch.clusters.launcher import SUBMITTED, Launcher, ask
from april.words import counted

PLAN, SUBMIT, REPORT = "plan.yaml", "submit.sh", "parts.txt"
"""what the job reads, how it is submitted, and where it says where each part is"""
PROGRAM = "april.launch.clusters.ray_job"
ENOUGH = "--restarts=0"
"""a part that dies ends its actor, and that is Ray's to start again"""


class Ray(Launcher):
    """The run's folder lies where all nodes see it under one path, and so does the environment with April and Ray. What
    is asked of the job later is read by it in that folder. Nothing of the run goes through Ray."""

    def files(self) -> dict[str, str]:
        return {PLAN: yaml.dump(self._plan(), Dumper=Plain, sort_keys=False, width=1000), SUBMIT: self._submit()}

    def _plan(self) -> dict:
        """What each part needs of its node, and its shell script, for which HOST, NAME and NODE are set there."""
        layout, launch = self.layout, self.layout.config.launch
        cores = launch.cores * layout.ranks_a_node
        learner = {
            "nodes": launch.learner_nodes,
            "needs": needs(cores, launch.memory_gb * layout.ranks_a_node, layout.learner_accelerators),
            "script": self._script(layout.learner(self._run_dir, '"$NODE"')),
        }
        holders = {
            role: {
                "count": count,
                "needs": needs(
                    launch.cores, launch.memory_gb, layout.worker_accelerators if role == "worker" else 0
                ),
                "script": self._script(layout.holder(role, self._run_dir, '"$NAME"')),
            }
            for role, count in layout.counts.items()
        }  # fmt: skip
        bind = layout.broker("BIND").replace("BIND", f'tcp://"$HOST":{launch.port}')
        return {
            "run": str(self.folder.parent),
            "orders": str(self.folder / SUBMITTED),
            "broker": {"script": self._script(bind)},
            "learner": learner,
            "holders": holders,
        }

    def _script(self, command: str) -> str:
        return "\n".join([*self.layout.preparations(), f"exec {command} {ENOUGH}"]) + "\n"

    @property
    def _run_dir(self) -> str:
        return shlex.quote(str(self.folder.parent))

    def _submit(self) -> str:
        """Ray's own tool finds the cluster by its own variable."""
        program = ["ray", "job", "submit", "--no-wait", "--", sys.executable, "-m", PROGRAM, str(self.folder / PLAN)]
        lines = [f"# the Ray job of April's run {self.layout.name}", "set -eu", *self.layout.preparations()]
        return "\n".join([*lines, shlex.join(program)]) + "\n"

    def submit(self) -> str:
        (self.folder / SUBMITTED).unlink(missing_ok=True)
        self.remember(worker=self.layout.config.worker.count, stop=False)
        said = ask(["bash", str(self.folder / SUBMIT)])
        job = re.search(r"raysubmit_\w+", said)
        if job is None:
            raise ConfigError(f"ray job submit names no job, but says: {said}")
        self.remember(job=job[0])
        return f"job {job[0]}"

    def status(self) -> str:
        said = ask(["ray", "job", "status", self._job])
        report = self.folder / REPORT
        return f"{said}\n{report.read_text()}" if report.is_file() else said

    @property
    def _job(self) -> str:
        if "job" not in self.remembered():
            raise ConfigError(
                f"run {self.layout.name} has not been submitted from this folder; `april launch` does that"
            )
        return self.remembered()["job"]

    def stop(self) -> str:
        self.remember(stop=True)
        return f"{self._job} is stopping: the learner writes a checkpoint, then the job ends"

    def scale(self, workers: int | None) -> str:
        workers = self.layout.config.worker.count if workers is None else workers
        self.remember(worker=workers)
        return f"asked {self._job} for {counted(workers, 'worker')}"


class Plain(yaml.SafeDumper):
    """Scripts as blocks of lines."""


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Plain.add_representer(str, _as_block)


def needs(cores: int, memory_gb: int, accelerators: int) -> dict[str, int]:
    """A bundle of a placement group."""
    asked = {"CPU": cores, "memory": memory_gb * 2**30}
    return asked | ({"GPU": accelerators} if accelerators else {})
