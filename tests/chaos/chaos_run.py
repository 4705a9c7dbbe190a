"""Breaks a run's processes while it trains, and counts what it has broken, and when."""

import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from tests.chaos.run_state import SYNC_OFF, RunState
from tests.support.run_processes import Job, summary, wait_until

VICTIMS = {
    "broker": ["tests.chaos.broker"],
    "worker": ["tests.chaos.peer worker"],
    "learner": ["-u -m tests.chaos.peer learner", "april.learner.launch"],
}
"""what is in the command line of a process that may be killed"""
WITH_AGENTS = VICTIMS | {"agents": ["tests.chaos.peer agents"], "program": ["april.agents.host"]}
PHASES = ("generating", "abort", "delivery", "training", "weights", "evaluating")
"""of the run, in which a kill is aimed"""
DELICATE = ("abort", "delivery")
"""short ones, of which a run with many kills has to have hit each"""
AIM_S = 15.0
"""longest wait for a phase; then the kill falls into another one"""
PATIENCE_S = 300.0
BATCH_GROUPS = 12
"""groups of a batch, of CONFIG"""

CONFIG = """
seed = 3
run = {{ name = "chaos", dir = "{folder}/runs" }}
model = {{ path = "{policy}" }}
data = {{ path = "{data}/train.jsonl", eval_path = "{data}/heldout.jsonl" }}
schedule.kind = "{schedule}"
schedule.rollout_batch_size = 12
schedule.over_sampling_batch_size = 20
schedule.n_samples_per_prompt = 4
schedule.max_steps = 100000
sampling = {{ max_response_tokens = 200 }}
evaluation = {{ prompts = 8, every = 5 }}
worker = {{ count = 3, slots = 16, prefetch = 2, chunk_tokens = 8, max_restarts = 1000 }}
learner = {{ ranks = 1, lr = 1e-5, checkpoint_every = 3, max_restarts = 1000 }}
broker.attempts = 1000
broker.max_restarts = 1000
broker.session_timeout_s = 4.0
broker.readopt_s = 4.0
broker.journal_file_records = 2000
weights = {{ publish_deadline_s = 3.0 }}
"""
AGENTS = """
agent.program = "tests.support.agent_programs:any_of_them"
agent.sessions = 96
agent.max_restarts = 1000
agent.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""
READ = "READ_BY_AGENTS"
"""in the environment: where programs write down what they read"""


class Chaos:
    """A run in `folder` and what happens to it.

    chaos = Chaos(folder, policy_folder, data_folder)
    chaos.kill("broker", "abort")
    chaos.finish()
    """

    def __init__(
        self, folder: Path, policy: Path, data: Path, tokens_between: int = 0, sync: bool = True,
        schedule: str = "april", agents: bool = False, variables: Mapping[str, str] | None = None,
        overrides: Sequence[str] = (),
    ):  # fmt: skip
        """`agents`: samples are sessions of programs with tools, and these and their hosts are killed, too.
        `variables`: of the environment of all parts; `overrides`: of the configuration."""
        self.run_dir = folder / "runs" / "chaos"
        self.config = folder / "run.toml"
        self.config.write_text(CONFIG.format(folder=folder, policy=policy, data=data, schedule=schedule))
        self.tokens_between = tokens_between
        self.environment = ({} if sync else {SYNC_OFF: "1"}) | dict(variables or {})
        self.overrides = overrides
        self.victims = WITH_AGENTS if agents else VICTIMS
        self.read = folder / "read"
        if agents:
            self.config.write_text(self.config.read_text() + AGENTS)
            self.read.mkdir()
            self.environment[READ] = str(self.read)
        self.kills: Counter[tuple[str, str]] = Counter()
        self.aimed: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        """kills by the phase that they were aimed at, and those that fell into it"""
        self.tokens_before: list[int] = []
        """acknowledged between a kill and the one before it"""
        self.state = RunState(self.run_dir)
        self._last_tokens = 0
        self.log = folder / "output"
        self.job = self._start(self.log)

    def _start(self, log: Path, *overrides: str) -> Job:
        command = [sys.executable, "-m", "tests.chaos.supervise", str(self.config), *self.overrides, *overrides]
        with mock.patch.dict(os.environ, self.environment):
            return Job(command, log)

    def kill(self, victim: str, phase: str, aim_s: float = AIM_S) -> None:
        """SIGKILL one process of a kind, in that phase of the run if it comes soon."""
        self.wait_for_tokens(self._last_tokens + self.tokens_between)
        while True:
            pid = self.process(victim)
            deadline = time.monotonic() + aim_s
            while self.state.now()[0] != phase and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(random.choice([0.0, random.uniform(0.0, 0.02)]))
            hit, tokens = self.state.now()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                break
        self.kills[victim, hit] += 1
        self.aimed[phase] += 1
        self.hits[phase] += hit == phase
        self.tokens_before.append(tokens - self._last_tokens)
        self._last_tokens = tokens

    def wait_for_tokens(self, count: int) -> None:
        """Until so many have been acknowledged in all."""
        wait_until(lambda: self.state.now()[1] >= count, self.job, PATIENCE_S)

    def go_on(self, tokens: int = 1000) -> None:
        """Let the run work undisturbed for so many tokens."""
        self.wait_for_tokens(self.state.now()[1] + tokens)

    def wait_for_log(self, part: str, text: str, times: int = 1) -> None:
        log = self.run_dir / "logs" / f"{part}.log"
        wait_until(lambda: log.read_text(errors="replace").count(text) >= times, self.job, PATIENCE_S)

    def process(self, victim: str) -> int:
        """A process of that kind, once there is one."""
        pattern, found = random.choice(self.victims[victim]), []
        wait_until(lambda: found.extend(self.job.descendants(pattern)) or found, self.job, PATIENCE_S)
        return random.choice(found)[0]

    def aim(self, victim: str) -> str:
        """The phase in which this kind of process was killed least."""
        return min(random.sample(PHASES, len(PHASES)), key=lambda phase: self.kills[victim, phase])

    def pause(self, victim: str, seconds: float) -> None:
        """SIGSTOP one process of a kind for a while; the run may end it meanwhile."""
        pid = self.process(victim)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    def half_open(self) -> None:
        """Let the connections of the learner and of one worker go dead without a word."""
        self.job.process.send_signal(signal.SIGUSR1)

    def finish(self) -> None:
        """Stop the run, go on with it for two steps more, and let it come to its end."""
        self.go_on()
        self.job.process.send_signal(signal.SIGINT)
        status = self.job.wait(PATIENCE_S)
        assert status == 130, f"status {status}\n{self.job.output}"
        steps = summary(self.run_dir)["steps"] + 2
        self.job = self._start(self.log.with_name("output-of-the-end"), "--schedule.max_steps", str(steps))
        assert self.job.wait(PATIENCE_S) == 0, self.job.output
        wait_until(lambda: self.job.descendants() == [])

    def cuts(self) -> int:
        """How often a power loss has taken bytes from the journal of a killed broker."""
        return self.log.read_text().count("bytes that no sync had reached are gone")

    def untried(self) -> list[str]:
        """What a run with many kills should have met and has not, one sentence each."""
        found = [f"no kill that was aimed at the {phase} fell into it" for phase in DELICATE if not self.hits[phase]]
        return found if self.cuts() else [*found, "no power loss took anything from the journal"]

    def table(self) -> str:
        """Kills by process and phase, and how many of those that were aimed at a phase fell into it."""
        phases = sorted({phase for _, phase in self.kills} | set(self.aimed))
        rows = [["", *phases, "all"]]
        for victim in self.victims:
            counts = [self.kills[victim, phase] for phase in phases]
            rows.append([victim, *map(str, counts), str(sum(counts))])
        hits, aimed = self.hits.total(), self.aimed.total()
        rows.append(["aimed, hit", *(f"{self.hits[p]} of {self.aimed[p]}" for p in phases), f"{hits} of {aimed}"])
        return "\n".join("  ".join(f"{cell:>11}" for cell in row) for row in rows)

    def end(self) -> None:
        self.job.end()
