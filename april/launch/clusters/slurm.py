"""Slurm: one job for broker and learner, requeued until the run is over, and jobs of workers that join the run.

With `launch.cpu_partition` the first job is heterogeneous: the broker's node, on which the script runs, and the
learner's nodes. Slurm starts, signals, requeues and ends both components by the first component's job id.
"""

import os
import shlex
from importlib import resources

import jinja2

from april.config import ConfigError
from april.launch.clusters.launcher import Launcher, ask
from april.util.text import counted

MAIN = "run.sbatch"
NOUNS = {"worker": "workers", "scorer": "scorers", "agents": "agents processes"}


class Slurm(Launcher):
    """Launches a run on Slurm. All nodes see the run folder under one path, and read the broker's address there."""

    def files(self) -> dict[str, str]:
        layout, launch = self.layout, self.layout.config.launch
        main = self._script(
            "slurm.sbatch.j2",
            nodes=launch.learner_nodes,
            ranks=layout.ranks_a_node,
            accelerators=layout.learner_accelerators,
            partition=launch.partition,
            cpu_partition=launch.cpu_partition,
            again=f"april launch scale {self._run_dir}",
            learner_log=self._log("learner-%t" if launch.learner_nodes > 1 else "learner"),
            broker=layout.broker(f"tcp://ADDRESS:{launch.port}").replace("ADDRESS", '"$address"'),
            learner=self._in_each_task(layout.learner(self._run_dir, "$SLURM_PROCID")),
        )
        return {MAIN: main} | {f"{role}.sbatch": self._holders(role, count) for role, count in layout.counts.items()}

    def _holders(self, role: str, count: int) -> str:
        layout, launch = self.layout, self.layout.config.launch
        return self._script(
            "slurm-holders.sbatch.j2",
            role=role,
            count=count,
            noun=NOUNS[role],
            partition=launch.partition if role == "worker" else launch.cpu_partition or launch.partition,
            megabytes_a_core=1024 * launch.memory_gb // launch.cores,
            accelerators=layout.worker_accelerators if role == "worker" else 0,
            log=self._log(f"{role}-%j-%t"),
            command=self._in_each_task(layout.holder(role, self._run_dir, f"{role}-$SLURM_JOB_ID-$SLURM_PROCID")),
        )

    def _log(self, name: str) -> str:
        """Options of srun for a part's log file; %j and %t in the name are its job id and task index."""
        return f"--open-mode=append --output={shlex.quote(str(self.logs_folder / f'{name}.log'))}"

    @staticmethod
    def _in_each_task(command: str) -> str:
        """Quote a command for `srun bash -c`, so that its variables are expanded in each task."""
        return shlex.quote(f"exec {command}")

    def _script(self, template: str, **values: object) -> str:
        launch = self.layout.config.launch
        asked = {"account": launch.account, "time": launch.time}
        text = (resources.files("april.launch.clusters") / template).read_text()
        return jinja2.Template(text, undefined=jinja2.StrictUndefined, keep_trailing_newline=True).render(
            name=self.layout.name,
            folder=self.folder,
            logs=shlex.quote(str(self.logs_folder)),
            cores=launch.cores,
            memory_gb=launch.memory_gb,
            asked=[f"--{option}={value}" for option, value in asked.items() if value],
            preparations="\n".join(self.layout.preparations()),
            **values,
        )

    def submit(self) -> str:
        main = self._submit_main()
        self.remember(main=main)
        for role in self.layout.counts:
            self._add(role, self.folder / f"{role}.sbatch")
        return f"job {main}, and {', '.join(self.remembered()['holders'])} with workers"

    def _submit_main(self) -> str:
        cpus = self.layout.config.launch.cpu_partition
        try:
            return ask(["sbatch", "--parsable", str(self.folder / MAIN)])
        except ConfigError as error:
            if not cpus:
                raise
            raise ConfigError(
                f"{error}; key 'launch.cpu_partition' = {cpus!r} asks for a heterogeneous job, which needs such a "
                "partition and Slurm's sched/backfill: name another one, or leave it out"
            ) from None

    def _add(self, role: str, script: object, *options: str) -> str:
        job = ask(["sbatch", "--parsable", *options, str(script)], environment=outside_of_jobs())
        self.remember(holders=self.remembered().get("holders", {}) | {job: role})
        return job

    @property
    def _jobs(self) -> list[str]:
        return [self.submitted("main"), *self.remembered().get("holders", {})]

    def status(self) -> str:
        return ask(["squeue", "--jobs", ",".join(self._jobs), "--format=%.10i %.24j %.9T %.10M %.6D %R"])

    def stop(self) -> str:
        """Signal all jobs: the broker stops the run, pending jobs are cancelled, workers without a broker end."""
        main = self._jobs[0]
        unfinished = self._processes()
        if unfinished:
            ask(["scancel", "--quiet", "--state=PENDING", *unfinished])
        for job in unfinished:
            ask(["scancel", "--quiet", "--signal=TERM", *["--batch"] * (job == main), job])
        return "the run is stopping: the learner writes a checkpoint, then all jobs end"

    def scale(self, workers: int | None) -> str:
        """Bring the number of worker processes to `workers`: stop surplus jobs, newest first, or add one job with the
        missing processes. None: restore the numbers that were asked for last, as a requeued job does."""
        wanted = self.layout.counts | self.remembered().get("wanted", {})
        if workers is not None:
            wanted["worker"] = workers
        self.remember(wanted=wanted)
        for role, number in wanted.items():
            sizes = self._running(role)
            current = sum(sizes.values())
            for job in sorted(sizes, key=int, reverse=True):
                if current - sizes[job] >= number:
                    ask(["scancel", "--quiet", "--signal=TERM", job])
                    ask(["scancel", "--quiet", "--state=PENDING", job])
                    current -= sizes[job]
            if current < number:
                self._add(role, self.folder / f"{role}.sbatch", f"--ntasks={number - current}")
        return f"asked for {counted(wanted['worker'], 'worker')}"

    def _running(self, role: str) -> dict[str, int]:
        """Job id -> number of processes, for each pending or running job whose processes have this role."""
        jobs = [job for job, job_role in self.remembered().get("holders", {}).items() if job_role == role]
        return {job: number for job, number in self._processes().items() if job in jobs}

    def _processes(self) -> dict[str, int]:
        """Number of processes by job id, of pending and running jobs; scancel would fail on ended ones. Further
        components of a heterogeneous job, which squeue lists with ids of their own, are left out."""
        jobs = self._jobs
        output = ask(["squeue", "--noheader", "--jobs", ",".join(jobs), "--Format=JobID:20,NumTasks:12"])
        return {job: int(number) for job, number in map(str.split, output.splitlines()) if job in jobs}


def outside_of_jobs() -> dict[str, str]:
    """This process's environment without the variables of a surrounding job, which sbatch would take for options."""
    return {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}
