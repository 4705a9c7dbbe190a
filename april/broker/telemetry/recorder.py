"""The run folder's figures: a line in metrics.jsonl for every trained step and evaluation, summary.json rewritten after
each."""

import logging
import math
import shutil
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import Group, Sample, SampleState
from april.broker.sessions import Sessions
from april.broker.telemetry.alarm import Alarms
from april.broker.telemetry.engine_gap import split_gaps
from april.broker.telemetry.evaluation import describe_set, versions_of
from april.broker.telemetry.failed_share import failed_share
from april.broker.telemetry.length_drift import Drift, drift_of
from april.broker.telemetry.lengths import describe, histogram, summarise_cohorts
from april.broker.telemetry.metrics_file import MetricsFile, without_lanes
from april.broker.telemetry.sink import Sinks
from april.broker.telemetry.slots import SlotMeans
from april.config.evaluation import EvaluationSet
from april.files.replace import replace_file
from april.processes import clock
from april.wire import limits
from april.wire.version import LARGEST

log = logging.getLogger(__name__)

REPLAY_TOLERANCE = 1e-6
"""of a replayed step's loss, relative to the one that was logged: on a CPU with as many ranks they are equal"""
DRIFT_S = 30.0
"""least time between two looks at the drift of lengths"""
BYTES_PER_TOKEN = 8
"""an int32 id and a float32 logprob"""
PACE_STEPS = 10
"""the newest steps, whose pace the estimate of the time left takes"""
LAST_STEPS = 3
"""of which the summary has the mean reward"""


class Mark(NamedTuple):
    """How much a sync covers."""

    accepted: dict[tuple[str, str], int]
    """`Recorder.accepted`"""
    lines: int
    """bytes of lines for metrics.jsonl"""


class Recorder:
    def __init__(
        self,
        run_dir: Path,
        run: str,
        max_steps: int,
        started_at: float,
        ledger: Ledger,
        sessions: Sessions,
        sinks: Sequence[str] = (),
        pace: str = "",
        alarms: Sequence[str] = (),
    ):
        """`pace`: the hardware whose time the engines keep, and its factor."""
        self.run_dir = run_dir
        self.pace = pace
        self.sinks = Sinks(sinks, run_dir)
        self.alarms = Alarms(alarms)
        self.run = run
        self.max_steps = max_steps
        self.started_at = started_at
        self.sessions = sessions
        self.steps: dict[int, dict[str, Any]] = {}
        """by batch, from 0: those that a learner can go back to, and the last before them"""
        self.step_times: deque[float] = deque(maxlen=PACE_STEPS)
        """of the newest steps that were trained since the broker started"""
        first_kept = ledger.first_kept_step
        self.lines = MetricsFile(run_dir / "metrics.jsonl", ledger.frontier, first_kept - LAST_STEPS)
        past = self.lines.past
        self.first_reward = past.first_reward
        self.generating_s, self.rollout_tokens = past.generating_s, past.rollout_tokens
        self.borne = Counter({"tokens": past.gradient_tokens, "empty_steps": past.empty_steps})
        """trained tokens that bore a gradient, and steps of which none did, where the learner says so"""
        for record in self.lines.first_steps():
            self.alarms.look(record)
        for record in self.lines.later_steps():
            self.generating_s += record["rollout_s"]
            self.rollout_tokens += record["rollout_tokens"]
            self._remember(record, first_kept)
            self.alarms.look(record)
        self.lines.complete(ledger.evaluated)
        before = read_summary(run_dir / "summary.json")
        self.wall_before_s = before.get("wall_s", 0.0)
        self.peak_tokens = before.get("buffer_peak", {}).get("tokens", 0)
        self.unacknowledged_before = before.get("tokens", {}).get("emitted_unacked", 0)
        self.refused_before = before.get("tokens", {}).get("refused", 0)
        self.replays = Counter({"same": 0, "different": 0} | before.get("replays", {}))
        """steps that were trained again, by whether their loss was the one that had been logged"""
        self.accepted: Counter[tuple[str, str]] = Counter()
        """`chunks` and `tokens` since the broker started, by use: `training` or `evaluation`"""
        self.acknowledged: dict[tuple[str, str], int] = {}
        """those of them that are on disk"""
        self.environment: Counter[str] = Counter()
        """since the broker started: observations, their tokens, and answers that failed"""
        self._environment_before: Counter[str] = Counter()
        """up to the last step"""
        self._lanes: list[dict[str, Any]] = []
        self._step_generating_s = 0.0
        self._step_tokens = 0
        self._aborted_samples = 0
        self.moves: Counter[str] = Counter()
        """since the broker started: stragglers that were `asked` back for another worker, and moves that are `done`"""
        self._moves_before = 0
        """done up to the last step"""
        self._slots = SlotMeans()
        self._settled = ledger.cohorts.created.copy()
        """lengths of the cohorts that were settled at the last step"""
        self._drift: Drift | None = None
        self._drift_due = 0.0

    # --- what happens meanwhile -----------------------------------------------------------------------------

    def lane(self, worker: str, kind: str, start: float, end: float) -> None:
        """Something a worker did: generate, weights; or an instant: abort, joined, lost. Unix seconds."""
        if len(self._lanes) < limits.LANE_RECORDS:
            self._lanes.append({"worker": worker, "kind": kind, "start": round(start, 4), "end": round(end, 4)})

    def aborted(self, samples: int) -> None:
        self._aborted_samples += samples

    def moved(self, how: str) -> None:
        self.moves[how] += 1

    def generating(self, seconds: float) -> None:
        """Time in which at least one training sample was being generated."""
        self._step_generating_s += seconds
        self.generating_s += seconds

    def occupied(self, busy: int, slots: int, waiting: int) -> None:
        """At this moment: slots of workers that generate, all of them, and training samples that wait for one."""
        self._slots.add(busy, slots, waiting)

    def accept(self, chunks: Sequence[int], tokens: Sequence[int]) -> None:
        """So many, of training and of evaluation, are in the journal."""
        for use, more, count in zip(("training", "evaluation"), chunks, tokens, strict=True):
            self.accepted["chunks", use] += more
            self.accepted["tokens", use] += count
        self._step_tokens += tokens[0]
        self.rollout_tokens += tokens[0]

    def observed(self, answers: int, tokens: int, failed: int) -> None:
        """Environments have answered turns, `tokens` in all; some have failed to."""
        self.environment["observations"] += answers
        self.environment["tokens"] += tokens
        self.environment["failed"] += failed

    def buffered(self, ledger: Ledger) -> None:
        """`buffer_peak`: most tokens of open and ready groups at a time, over the whole run; what is delivered is with
        the learner. The simulator's has the same meaning."""
        self.peak_tokens = max(self.peak_tokens, ledger.tokens["open"] + ledger.tokens["ready"])

    # --- steps ----------------------------------------------------------------------------------------------

    def consumed(self, step: int, ledger: Ledger, learner: dict[str, float], now: float) -> dict[str, Any]:
        """Write down batch `step`, which the learner has trained; one that is replayed keeps its first line, and is
        compared with it.

        The line's own `step` counts the batches in the weights from then on.
        """
        if step in self.steps:
            self._compare(step, learner)
        else:
            record = self._describe(step, ledger, learner, now)
            record["alarms"] = self.alarms.look(record)
            self.lines.append(record)
            self._remember(record, ledger.first_kept_step)
            self.step_times.append(record["time"])
            self.sinks.step(record)
        return self.steps[step]

    def mark(self) -> Mark:
        """What the next sync will have put on disk."""
        return Mark(dict(self.accepted), self.lines.waiting)

    def synced(self, mark: Mark) -> None:
        """That is on disk, and may be counted and told."""
        self.acknowledged = mark.accepted
        self.lines.release(mark.lines)

    def _remember(self, record: dict[str, Any], first_kept: int) -> None:
        """Without its lanes; of what lies before `first_kept`, where no learner can go back to, only sums stay."""
        step = record["step"] - 1
        if (share := (record.get("gradient") or {}).get("tokens")) is not None:
            self.borne["tokens"] += round(share * record["tokens"])
            self.borne["empty_steps"] += share == 0
        self.steps[step] = without_lanes(record)
        if step == 0:
            self.first_reward = record["reward"]
        while self.steps and (oldest := next(iter(self.steps))) < first_kept - LAST_STEPS:
            del self.steps[oldest]
            self.lines.forget(oldest + 1)

    @property
    def newest(self) -> dict[str, Any]:
        """The last line that was written, without its lanes; empty before the first."""
        return next(reversed(self.steps.values()), {})

    def _compare(self, step: int, replayed: dict[str, float]) -> None:
        """Whatever was trained after it followed from the first logging, so that a replay with another loss leads to
        other weights than those that the run has published."""
        logged = self.steps[step]["learner"]
        if "loss" not in logged or "loss" not in replayed:
            return
        same = same_loss(logged["loss"], replayed["loss"])
        self.replays["same" if same else "different"] += 1
        if not same:
            log.warning(
                "step %d was replayed with a loss of %s where %s had been logged: the weights are no longer those that "
                "were published; expected only on accelerators, or with another number of ranks or other keys",
                step + 1, replayed["loss"], logged["loss"], extra={"step": step + 1},
            )  # fmt: skip

    def _describe(self, step: int, ledger: Ledger, learner: dict[str, float], now: float) -> dict[str, Any]:
        groups = ledger.deliveries[step]
        samples = [sample for group in groups for sample in group.samples if sample.state is SampleState.DONE]
        ages = tokens_by_age(groups, step)
        sizes = [sample.sampled for sample in samples]
        lengths = Counter(sizes)
        created = ledger.cohorts.created - self._settled
        self._settled = ledger.cohorts.created.copy()
        drift = self._measure_drift(ledger, now)
        gaps, learner = split_gaps(learner, step)
        environment, self._environment_before = self.environment - self._environment_before, self.environment.copy()
        record = {
            "step": step + 1,
            "time": round(now, 3),
            "reward": round(sum(sample.reward for sample in samples if sample.reward is not None) / len(samples), 6),
            "reward_details": mean_details(samples),
            "groups": len(groups),
            "samples": len(samples),
            "tokens": sum(sizes),
            "rollout_s": round(self._step_generating_s, 4),
            "rollout_tokens": self._step_tokens,
            "rollout_tokens_per_s": per_second(self._step_tokens, self._step_generating_s),
            "staleness": describe_ages(ages) | {"bound": ledger.rules.max_staleness},
            "slots": self._slots.means(),
            "disk_free_bytes": shutil.disk_usage(self.run_dir).free,
            "lengths": {
                "trained": describe(lengths),
                "trained_histogram": histogram(lengths),
                "created_histogram": histogram(created),
                "drift": drift and drift.to_json(),
            },
            "tokens_ledger": self.account(ledger),
            "round": {
                "partials_waiting": ledger.open_samples.count(SampleState.PARTIAL),
                "surplus_groups": len(ledger.ready),
                "aborted_samples": self._aborted_samples,
                "moved_samples": self.moves["done"] - self._moves_before,
            },
            "environment": {name: environment[name] for name in ("observations", "tokens", "failed")},
            "discarded_groups": discarded_groups(ledger),
            "gradient": gradient_shares(learner),
            "engine_gaps": gaps,
            "lanes": self._lanes,
            "learner": learner,
        }
        self._lanes, self._step_generating_s, self._step_tokens, self._aborted_samples = [], 0.0, 0, 0
        self._slots, self._moves_before = SlotMeans(), self.moves["done"]
        return record

    def _measure_drift(self, ledger: Ledger, now: float) -> Drift | None:
        """At most every DRIFT_S, since it holds the loop up for a while; the last verdict in between."""
        if now >= self._drift_due:
            self._drift, self._drift_due = drift_of(ledger.cohorts), now + DRIFT_S
        return self._drift

    def evaluated(self, step: int, asked: list[tuple[EvaluationSet, list[Group]]]) -> dict[str, Any]:
        """Write down an evaluation that is complete: what `describe_set` says of the first of the sets, and where any
        has a name of its own what it says of each, in `sets` by name."""
        of_sets = [(one, describe_set(groups, one.samples)) for one, groups in asked]
        versions = sorted({version for _, groups in asked for version in versions_of(groups)})
        result = {
            "step": step,
            "time": round(clock.now(), 3),
            "version": list(versions[-1]) if versions else None,
            "versions": [list(version) for version in versions],
            **of_sets[0][1],
        }
        if any(one.number for one, _ in of_sets):
            result["sets"] = {one.name: found for one, found in of_sets}
        self.lines.append_evaluation(result)
        self.sinks.evaluation(result, clock.now())
        return result

    def account(self, ledger: Ledger) -> dict[str, Any]:
        return ledger.account() | {
            "emitted_unacked": min(LARGEST, self.unacknowledged_before + self.sessions.unacknowledged_tokens()),
            "refused": self.refused_before + self.sessions.refused_tokens(),
        }

    def write_summary(self, ledger: Ledger, state: str, now: float, data: dict[str, int]) -> None:
        """`data`: counts of the training prompts."""
        last = [
            self.steps[step]["reward"]
            for step in range(ledger.consumed - LAST_STEPS, ledger.consumed)
            if step in self.steps
        ]
        summary = {
            "run": self.run,
            "state": state,
            "steps": ledger.consumed,
            "max_steps": self.max_steps,
            "wall_s": round(self.wall_before_s + now - self.started_at, 2),
            "reward": {
                "first": self.first_reward if last else None,
                "last3": round(sum(last) / len(last), 6) if last else None,
            },
            "evaluation": [ledger.evaluated[step] for step in sorted(ledger.evaluated)],
            "tokens": self.account(ledger),
            "gradient": dict(self.borne) if "tokens" in self.newest.get("gradient", {}) else None,
            "ledger_closed": ledger.closed,
            "rollout_tokens_per_s": per_second(self.rollout_tokens, self.generating_s),
            "staleness": describe_ages(self._ages_until(ledger.consumed)),
            "buffer_peak": {"tokens": self.peak_tokens, "bytes": self.peak_tokens * BYTES_PER_TOKEN},
            "lengths": summarise_cohorts(ledger.cohorts),
            "data": data,
            "discarded_groups": discarded_groups(ledger),
            "failed_share": failed_share(ledger),
            "replays": dict(self.replays),
            "pace": self.pace,
            "starts": {"broker": ledger.starts, "learner": ledger.branch + 1},
        }
        replace_file(self.run_dir / "summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2))

    def _ages_until(self, consumed: int) -> Counter[int]:
        """Tokens by staleness of the batches below `consumed`."""
        forgotten = Counter(self.lines.past.tokens_by_age)
        return sum((ages_of(line) for step, line in self.steps.items() if step < consumed), forgotten)


def same_loss(logged: float | None, replayed: float) -> bool:
    """None is what JSON has for a loss that is not finite."""
    if logged is None or not math.isfinite(logged):
        return not math.isfinite(replayed)
    return math.isclose(logged, replayed, rel_tol=REPLAY_TOLERANCE)


def gradient_shares(learner: dict[str, float]) -> dict[str, float]:
    """Shares of a batch's tokens and groups that bore a gradient, where the learner has said so."""
    shares = {}
    for name, borne in (("tokens", "trained_tokens"), ("groups", "gradient_groups")):
        if borne in learner and name in learner:
            shares[name] = round(learner[borne] / max(1.0, learner[name]), 6)
    return shares


def discarded_groups(ledger: Ledger) -> dict[str, int]:
    """Since the beginning, by reason."""
    return {reason: ledger.counts[reason] for reason in sorted(ledger.discarded)}


def mean_details(samples: list[Sample]) -> dict[str, float]:
    """What the rewards are made of: the mean of each figure over the samples that have it."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in (sample.details or {}).items():
            found.setdefault(name, []).append(value)
    return {name: round(sum(values) / len(values), 6) for name, values in sorted(found.items())}


def tokens_by_age(groups: list[Group], step: int) -> Counter[int]:
    """Tokens of a batch by staleness: `step` minus the step of the version that generated them."""
    ages: Counter[int] = Counter()
    for group in groups:
        for line in group.lines:
            if line.state is SampleState.DONE:
                for _, _, _, _, tokens, observed, _, sampled_at in line.places:
                    if not observed:
                        ages[step - sampled_at] += tokens
    return ages


def describe_ages(ages: Counter[int]) -> dict[str, Any]:
    total = sum(ages.values())
    mean = sum(age * tokens for age, tokens in ages.items()) / total if total else 0.0
    return {
        "mean": round(mean, 4),
        "max": max(ages, default=0),
        "tokens_by_age": {str(age): ages[age] for age in sorted(ages)},
    }


def ages_of(line: dict[str, Any]) -> Counter[int]:
    return Counter({int(age): tokens for age, tokens in line["staleness"]["tokens_by_age"].items()})


def per_second(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 1) if seconds > 0 else 0.0


def read_summary(path: Path) -> dict[str, Any]:
    """What an earlier broker of this run wrote; nothing where a power loss has left it empty or torn."""
    try:
        return orjson.loads(path.read_bytes()) if path.exists() else {}
    except orjson.JSONDecodeError as error:
        log.warning("%s is damaged (%s); what it counted before this start is left out", path, error)
        return {}
