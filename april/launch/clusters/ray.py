"""Ray: submits one job, whose program starts each part in an actor that Ray restarts."""

import re
import shlex
import sys

import yaml

from april.config import ConfigError
from april.launch.clusters.launcher import SUBMITTED, Launcher, ask
from april.util.text import counted

PLAN, SUBMIT, REPORT = "plan.yaml", "submit.sh", "parts.txt"
"""Files in the launch folder: the job's input, the submit command, and the job's report on each part."""
PROGRAM = "april.launch.clusters.ray_job"
NO_RESTARTS = "--restarts=0"
"""Option by which `april part` restarts nothing itself: a part that dies ends its actor, which Ray restarts."""


class Ray(Launcher):
    """Launches a run on a Ray cluster. All nodes see the run folder, and the environment with April and Ray, under the
    same paths. The job reads the wanted number of workers, and requests to stop, from the run folder. No data of the
    run goes through Ray."""

    def files(self) -> dict[str, str]:
        return {PLAN: yaml.dump(self._plan(), Dumper=BlockDumper, sort_keys=False, width=1000), SUBMIT: self._submit()}

    def _plan(self) -> dict:
        """Resources and shell script of each part; the job sets HOST, NAME and NODE for the script."""
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
            "report": str(self.folder / REPORT),
            "broker": {"script": self._script(bind)},
            "learner": learner,
            "holders": holders,
        }

    def _script(self, command: str) -> str:
        return "\n".join([*self.layout.preparations(), f"exec {command} {NO_RESTARTS}"]) + "\n"

    def _submit(self) -> str:
        """Shell script that submits the Ray job; `ray job submit` finds the cluster by Ray's own environment
        variable."""
        program = [sys.executable, "-P", "-m", PROGRAM, str(self.folder / PLAN)]
        program = ["ray", "job", "submit", "--no-wait", "--", *program]
        lines = [f"# the Ray job of April's run {self.layout.name}", "set -eu", *self.layout.preparations()]
        return "\n".join([*lines, shlex.join(program)]) + "\n"

    def submit(self) -> str:
        (self.folder / SUBMITTED).unlink(missing_ok=True)
        self.remember(worker=self.layout.config.worker.count, stop=False)
        output = ask(["bash", str(self.folder / SUBMIT)])
        job = re.search(r"raysubmit_\w+", output)
        if job is None:
            raise ConfigError(f"ray job submit names no job, but says: {output}")
        self.remember(job=job[0])
        return f"job {job[0]}"

    def status(self) -> str:
        output = ask(["ray", "job", "status", self._job])
        report = self.folder / REPORT
        return f"{output}\n{report.read_text()}" if report.is_file() else output

    @property
    def _job(self) -> str:
        return self.submitted("job")

    def stop(self) -> str:
        self.remember(stop=True)
        return f"{self._job} is stopping: the learner writes a checkpoint, then the job ends"

    def scale(self, workers: int | None) -> str:
        workers = self.layout.config.worker.count if workers is None else workers
        self.remember(worker=workers)
        return f"bundle {self._job} for {counted(workers, 'worker')}"


class BlockDumper(yaml.SafeDumper):
    """YAML dumper that writes shell scripts as blocks of lines."""


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


BlockDumper.add_representer(str, _as_block)


def needs(cores: int, memory_gb: int, accelerators: int) -> dict[str, int]:
    """Resources of one part as a bundle of a Ray placement group: {"CPU": cores, "memory": bytes, "GPU": accelerators},
    without "GPU" if the part needs none."""
    bundle = {"CPU": cores, "memory": memory_gb * 2**30}
    return bundle | ({"GPU": accelerators} if accelerators else {})
