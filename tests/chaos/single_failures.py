"""Every call that the processes of a run make to the file system and the network fails once, one call at a time, with
each error of a list, while the run goes on.

    python -m tests.chaos.single_failures broker --minutes 8 --folder FOLDER

Each of the SWEEPS is a run of its own. A place that a run does not come to by itself, because it belongs to the start
of a part, is reached by killing the part. A journal that cannot be written waits for somebody who restarts the broker:
so does the driver.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from tests.chaos.chaos_run import VICTIMS, WITH_AGENTS, Chaos
from tests.chaos.failing_calls import FAILING, Orders, errors_of, wait_for
from tests.chaos.journal_history import History
from tests.chaos.session_history import SessionHistory
from tests.support.run_processes import summary
from tests.support.small_run import PROMPTS, make_policy, make_prompts

OVERRIDES = [
    "--worker.count", "1", "--worker.slots", "8", "--schedule.rollout_batch_size", "4",
    "--schedule.over_sampling_batch_size", "6", "--schedule.n_samples_per_prompt", "2",
    "--sampling.max_response_tokens", "24", "--evaluation.every", "10", "--evaluation.prompts", "4",
    "--learner.checkpoint_every", "1", "--broker.journal_file_records", "150", "--weights.transfer_deadline_s", "10",
    "--broker.session_timeout_s", "3", "--samples.every", "1",
]  # fmt: skip
"""A run with short steps, and with files of the journal that are soon full."""
STARTUP = Path(__file__).with_name("startup")
"""Folder on PYTHONPATH of all processes, so that calls of those that parts start fail, too."""
REACHED_S, STARTED_S = 4.0, 40.0
"""Longest wait for a call: of a part at work, and of one that was just killed."""
PROGRESS_S = 90.0
"""Longest wait for the steps after a call has failed; then the run is stuck."""
STEPS = 2
"""Steps after a call has failed with which the run has gone on; the next one may have been under way."""
BY_HAND_S = 6.0
"""Age of a journal that cannot be written at which its broker is restarted."""
TAIL_BYTES = 1 << 18


@dataclass(frozen=True)
class SweptRun:
    """A run, and the parts of it whose calls fail."""

    roles: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    agents: bool = False


SWEEPS = {
    "broker": SweptRun(("broker", "snapshot")),
    "learner": SweptRun(("learner",)),
    "worker": SweptRun(("worker",)),
    "scorer": SweptRun(("scorer", "verifier"), ("--reward.where", "scorer")),
    "agents": SweptRun(
        ("agents", "program"), ("--agent.program", "tests.support.agent_programs:in_three_turns"), agents=True
    ),
}
KILLED = WITH_AGENTS | {"scorer": ["tests.chaos.peer scorer"], "verifier": ["april.workers.rewards.process"]}
"""What is in the command line of the processes of each part that can be killed; a snapshot comes by itself."""
USUAL = {"unread", "superseded", "agent_failed"}
"""Reasons for which tokens of sessions are discarded by what a program does: it fails when its own connection does."""


@dataclass
class Sweep:
    """What came of a sweep: places and error numbers of the calls that failed, and sentences on those that stopped the
    run."""

    failed: list[tuple[str, str, int]] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    not_reached: list[tuple[str, str]] = field(default_factory=list)
    by_hand: int = 0
    lost: list[str] = field(default_factory=list)
    """What the judge of the journal found wrong."""
    discarded: int = 0
    """Tokens of groups that were discarded."""


class FailingRun(Chaos):
    """A run whose calls fail on order.

    run = FailingRun(folder, policy_folder, data_folder, SWEEPS["broker"])
    sweep = run.sweep(calls=300, until=time.monotonic() + 1200)
    """

    def __init__(self, folder: Path, policy: Path, data: Path, swept: SweptRun):
        self.orders, self.swept = Orders(folder / "orders"), swept
        found = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
        variables = {FAILING: str(folder / "orders"), "PYTHONPATH": found}
        overrides = [*OVERRIDES, *swept.overrides]
        super().__init__(folder, policy, data, agents=swept.agents, variables=variables, overrides=overrides)
        self.victims = KILLED
        self.result = Sweep()

    def sweep(self, calls: int, until: float, seed: int = 0) -> Sweep:
        """Let calls fail until so many have, or until that time; then finish and judge the run."""
        self.wait_for_step(3)
        chance, tried = random.Random(seed), set()
        while self.goes_on(calls, until):
            kinds = ([call for call in kind if call not in tried] for kind in self.calls())
            waiting = next(filter(None, kinds), None)
            if waiting is None:
                break
            tried.add(call := chance.choice(waiting))
            if not self.fail(*call) and call[3]:
                self.result.not_reached.append(call[:2])
        self.finish()
        history = (SessionHistory if self.swept.agents else History)(self.run_dir, PROMPTS)
        self.result.lost = history.judge()
        discarded = summary(self.run_dir)["tokens"]["discarded"]
        self.result.discarded = sum(count for reason, count in discarded.items() if reason not in USUAL)
        return self.result

    def calls(self) -> Iterator[list[tuple[str, str, int, bool]]]:
        """(role, place, error number, whether the place is of a part's start alone) of the calls that can fail so far:
        each place at work once, then those of starts, then each place at work with its other errors."""
        places = {again: [place for place in self.orders.places(again) if place[0] in self.swept.roles]
                  for again in (True, False)}  # fmt: skip
        at_start = [place for place in places[False] if place[0] in self.victims]
        at_work = places[True] + [place for place in places[False] if place not in at_start]
        yield [(*place, errors_of(place[1])[0], False) for place in at_work]
        yield [(*place, errors_of(place[1])[0], True) for place in at_start]
        yield [(*place, number, False) for place in at_work for number in errors_of(place[1])[1:]]

    def goes_on(self, calls: int, until: float) -> bool:
        return len(self.result.failed) < calls and time.monotonic() < until

    def fail(self, role: str, place: str, number: int, at_start: bool) -> bool:
        """Let the next call from a place fail, and see the run go on; whether the call came. A place of a part's start
        alone is reached by killing the part."""
        self.orders.give(role, place, number)
        if at_start:
            self.kill_part(role)
        longest_s = STARTED_S if at_start or role not in self.victims else REACHED_S
        reached = wait_for(lambda: self.orders.was_followed or self.has_ended, longest_s)
        if self.orders.withdraw() or not reached:
            return False
        self.result.failed.append((role, place, number))
        fault = f"{role}: {place}: {os.strerror(number)}"
        print(f"{len(self.result.failed)}: {fault}", flush=True)
        due, deadline, by_hand_at = self.step + STEPS, time.monotonic() + PROGRESS_S, time.monotonic() + BY_HAND_S
        while self.step < due and time.monotonic() < deadline and not self.has_ended:
            if time.monotonic() > by_hand_at and self.waits_for_somebody:
                self.result.by_hand += 1
                self.kill_part("broker")
                by_hand_at = deadline
            time.sleep(0.05)
        if self.step < due:
            print(f"STUCK after {fault}", flush=True)
            self.result.stuck.append(fault)
            self.revive()
        return True

    @property
    def waits_for_somebody(self) -> bool:
        """Whether the broker's journal cannot be written, and it does not go on by itself."""
        log = self.log_of_broker.read_text(errors="replace")
        return log.rfind("nothing is acknowledged any more") > max(log.rfind("broker of run"), log.rfind("going on as"))

    def revive(self) -> None:
        if self.has_ended:
            self.job = self._start(self.log.with_name(f"output-{len(self.result.stuck)}"))
        else:
            for role in VICTIMS:
                self.kill_part(role)
        self.wait_for_step(self.step + 1)

    def kill_part(self, role: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process(role), signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        return self.job.process.poll() is not None

    @property
    def log_of_broker(self) -> Path:
        return self.run_dir / "logs" / "broker.log"

    def wait_for_step(self, step: int) -> None:
        if not wait_for(lambda: self.step >= step, 2 * PROGRESS_S):
            raise SystemExit(f"step {step} has not come:\n{self.job.output[-3000:]}")

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        for line in reversed(lines):
            with contextlib.suppress(orjson.JSONDecodeError):
                record = orjson.loads(line)
                if "evaluation" not in record:
                    return record["step"]
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", choices=SWEEPS, help="the parts whose calls fail")
    parser.add_argument("--calls", type=int, default=300, help="that fail [default 300]")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no other call fails [default 8]")
    parser.add_argument("--folder", type=Path, help="of the run, kept [default a temporary one]")
    parser.add_argument("--json", type=Path, help="file for the result; stuck calls and losses are no failure then")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="april-failures-"))
    result = sweep(folder, options.calls, options.minutes, SWEEPS[options.sweep])
    print(
        f"{len(result.failed)} calls failed; {result.by_hand} times the broker was restarted; {result.discarded} tokens"
    )
    print(*(f"not reached: {role} {place}" for role, place in result.not_reached), sep="\n")
    print(*result.stuck, *result.lost, sep="\n")
    if options.json:
        options.json.write_bytes(orjson.dumps(asdict(result)))
        return 0
    return 1 if result.stuck or result.lost or result.discarded else 0


def sweep(folder: Path, calls: int, minutes: float, swept: SweptRun) -> Sweep:
    """A sweep of so many calls, in a run of a tiny policy in `folder`."""
    if not (folder / "policy").exists():
        for name in ("policy", "data"):
            (folder / name).mkdir(parents=True)
        make_policy(folder / "policy")
        make_prompts(folder / "data")
    run = FailingRun(folder, folder / "policy", folder / "data", swept)
    try:
        return run.sweep(calls, time.monotonic() + 60 * minutes)
    finally:
        run.end()


if __name__ == "__main__":
    sys.exit(main())
