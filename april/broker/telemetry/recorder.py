"""Records a run's metrics: a line in metrics.jsonl for every trained step and evaluation, and summary.json, rewritten
after each."""

import contextlib
import logging
import math
import shutil
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from zlib_ng.zlib_ng import crc32

from april.broker.alarms.alarm import Alarms
from april.broker.ledger.events import StepRecorded
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import Group, GroupState, Sample, SampleState
from april.broker.ledger.state import DEAD_SAMPLE
from april.broker.peers import Peers
from april.broker.telemetry.census import SlotMeans
from april.broker.telemetry.evaluation import describe_set, versions_of
from april.broker.telemetry.lengths import LengthDrift, describe_lengths, drift_of, length_histogram, summarise_cohorts
from april.broker.telemetry.metrics_file import MetricsFile, StepSums, earlier_counts, without_timeline
from april.broker.telemetry.sinks import Sinks
from april.config.evaluation import EvaluationSet
from april.util import clock
from april.util.files import replace_file
from april.wire import limits
from april.wire.message import MAX_NUMBER, Version
from april.wire.training import ENGINE_GAP_PREFIX

log = logging.getLogger(__name__)

REPLAY_TOLERANCE = 1e-6
"""Largest relative difference at which the losses of a step and of its replay count as equal; on a CPU with the same
number of ranks they are identical."""
DRIFT_S = 30.0
"""Least interval between two measurements of the drift of response lengths, seconds."""
BYTES_PER_TOKEN = 8
"""Bytes that a buffered token takes: an int32 id and a float32 log-probability."""
PACE_STEPS = 10
"""Number of newest steps whose speed gives the estimated time left."""
LAST_STEPS = 3
"""Number of newest steps over which summary.json gives the mean reward."""


class SyncMark(NamedTuple):
    """State of the metrics at the beginning of a sync: what the sync will have put on disk at its end."""

    accepted: dict[tuple[str, str], int]
    """Copy of `Recorder.accepted` at the beginning of the sync."""
    lines: int
    """Number of bytes in metrics lines that may be written to metrics.jsonl after the sync."""


@dataclass
class StepCounts:
    """Counts since the last trained step, for the record of the next one."""

    generating_s: float = 0.0
    """Seconds in which at least one training sample was being generated."""
    tokens: int = 0
    """Training tokens accepted."""
    aborted: int = 0
    """Samples that workers have handed back because a round ended or a drain began."""
    moved: int = 0
    """Stragglers moved to another worker."""
    environment: Counter[str] = field(default_factory=Counter)
    """Number of `observations` of environments, of their `tokens`, and of answers that environments `failed` to
    give."""
    slots: SlotMeans = field(default_factory=SlotMeans)
    spans: list[dict[str, Any]] = field(default_factory=list)
    """Spans of the workers' timelines that were reported since the last trained step."""


class Recorder:
    """Counts what happens in a run, and writes it to metrics.jsonl, summary.json and the loggers `operations.sinks`."""

    def __init__(
        self,
        run_dir: Path,
        run: str,
        max_steps: int,
        started_at: float,
        ledger: Ledger,
        peers: Peers,
        sinks: Sequence[str] = (),
        pace: str = "",
        alarms: Sequence[str] = (),
        line_of: Callable[[Any], bytes | None] = lambda reference: None,
    ):
        """`pace`: hardware that simulated engines imitate, and the factor by which the run lasts longer than on it;
        empty for real engines. `line_of(reference)`: line of metrics.jsonl of a step, by its journal reference; None if
        damaged. `run`: name of the run; `started_at`: start of the broker, Unix seconds; `sinks`, `alarms`: their
        names."""
        self.run_dir = run_dir
        self.pace = pace
        self.sinks = Sinks(sinks, run_dir)
        self.alarms = Alarms(alarms)
        self.run = run
        self.max_steps = max_steps
        self.started_at = started_at
        self.peers = peers
        self.steps: dict[int, dict[str, Any]] = {}
        """Step records by batch, from 0: those of batches that a learner may train again, and `LAST_STEPS` before
        them."""
        self.step_times: deque[float] = deque(maxlen=PACE_STEPS)
        """Times at which the newest steps were trained, since the broker started, Unix seconds."""
        first_kept = ledger.first_kept_step
        self.metrics_file = MetricsFile(
            run_dir / "metrics.jsonl", ledger.steps.frontier, first_kept - LAST_STEPS,
            [step + 1 for step in ledger.recorded], lambda step: line_of(ledger.recorded[step - 1]),
        )  # fmt: skip
        self.sums: StepSums = deepcopy(self.metrics_file.summary)
        """Sums over all recorded steps."""
        for record in self.metrics_file.first_steps():
            self.alarms.look(record)
        for record in self.metrics_file.later_steps():
            self._remember(record, first_kept)
            self.alarms.look(record)
        self.metrics_file.complete(ledger.evaluated)
        before = earlier_counts(read_summary(run_dir / "summary.json"))
        self.wall_before_s = before.wall_s
        self.peak_tokens = before.buffer_peak.get("tokens") or 0
        self.unacknowledged_before, self.refused_before = before.tokens.emitted_unacked, before.tokens.refused
        self.replays = Counter({"same": 0, "different": 0} | before.replays)
        """Number of steps trained again after a restart, by whether their loss was the `same` as logged or
        `different`."""
        self.accepted: Counter[tuple[str, str]] = Counter()
        """Number of accepted `chunks` and `tokens` since the broker started, by use (`training` or `evaluation`)."""
        self.acknowledged: dict[tuple[str, str], int] = {}
        """Value of `accepted` at the last finished sync: the accepted chunks and tokens that are on disk."""
        self.environment: Counter[str] = Counter()
        """`observations` of environments, their `tokens`, and answers not given (`failed`), since the broker began."""
        self.moves: Counter[str] = Counter()
        """Number of stragglers that workers were `asked` to hand back for migration, and of moves that are `done`,
        since the broker started."""
        self._step = StepCounts()
        self._settled = ledger.cohorts.created.copy()
        """Responses by length (tokens) in `ledger.cohorts.created` at the last recorded step: those of cohorts (groups
        created one after the other) of which each group is trained or discarded."""
        self._drift: LengthDrift | None = None
        self._drift_due = 0.0

    # --- between steps --------------------------------------------------------------------------------------

    def add_span(self, worker: str, kind: str, start: float, end: float) -> None:
        """Add a span of a worker's timeline (generate, weights) or an instant (abort, joined, lost); Unix seconds."""
        if len(self._step.spans) < limits.MAX_ACTIVITY_SPANS:
            self._step.spans.append({"worker": worker, "kind": kind, "start": round(start, 4), "end": round(end, 4)})

    def add_aborted(self, samples: int) -> None:
        self._step.aborted += samples

    def add_move(self, phase: str) -> None:
        """Count a step of the migration of a straggler to another worker; `phase`: `asked` (its worker has to hand it
        back) or `done`."""
        self.moves[phase] += 1
        self._step.moved += phase == "done"

    def add_generating_time(self, seconds: float) -> None:
        """Add a period, in seconds, in which at least one training sample was being generated."""
        self._step.generating_s += seconds

    def add_slot_usage(self, busy: int, slots: int, waiting: int) -> None:
        """Add a measurement: number of busy slots of all workers, of all slots, and of training samples that wait for a
        slot."""
        self._step.slots.add(busy, slots, waiting)

    def add_accepted(self, chunks: Sequence[int], tokens: Sequence[int]) -> None:
        """Add chunks and tokens accepted for the journal to the counters; each argument is (training, evaluation)."""
        for use, chunk_count, token_count in zip(("training", "evaluation"), chunks, tokens, strict=True):
            self.accepted["chunks", use] += chunk_count
            self.accepted["tokens", use] += token_count
        self._step.tokens += tokens[0]

    def add_observations(self, observations: int, tokens: int, failed: int) -> None:
        """Count observations of environments and their tokens, and turns that an environment failed to answer."""
        for counts in (self.environment, self._step.environment):
            counts.update(observations=observations, tokens=tokens, failed=failed)

    def update_peak(self, ledger: Ledger) -> None:
        """Update the entry `buffer_peak` of summary.json: the most tokens that open and ready groups have held at one
        time in the run.

        Delivered groups do not count; the simulator uses the same definition.
        """
        self.peak_tokens = max(self.peak_tokens, ledger.account.tokens["open"] + ledger.account.tokens["ready"])

    # --- steps ----------------------------------------------------------------------------------------------

    def record_step(self, step: int, ledger: Ledger, learner: dict[str, float], now: float) -> dict[str, Any]:
        """Record batch `step` (from 0), which the learner has trained; `learner`: its metrics. Returns the record.

        A replayed step keeps its first record, and its loss is compared with the recorded one. The record's own `step`
        is the policy step that the training has led to, `step + 1`.
        """
        if step in self.steps:
            self._compare(step, learner)
        else:
            record = self._describe(step, ledger, learner, now)
            record["alarms"] = self.alarms.look(record)
            line = self.metrics_file.append(record)
            ledger.commit(StepRecorded(step), [(crc32(line), line)])
            self._remember(record, ledger.first_kept_step)
            self.step_times.append(record["time"])
            self.sinks.step(record)
        return self.steps[step]

    def sync_mark(self) -> SyncMark:
        """What the sync of the journal that begins now will put on disk; `synced` gets it at the sync's end."""
        return SyncMark(dict(self.accepted), self.metrics_file.waiting)

    def synced(self, mark: SyncMark) -> None:
        """Handle the end of a sync: count the accepted tokens that `mark` covers as acknowledged, and write the metrics
        lines it covers."""
        self.acknowledged = mark.accepted
        self.metrics_file.release(mark.lines)

    def _remember(self, record: dict[str, Any], first_kept: int) -> None:
        """Keep a step's record without its timeline spans. Older records are reduced to sums: those of steps more than
        `LAST_STEPS` before `first_kept`, the first batch that a learner may train again."""
        step = record["step"] - 1
        self.sums.add(record)
        self.steps[step] = without_timeline(record)
        while self.steps and (oldest := next(iter(self.steps))) < first_kept - LAST_STEPS:
            del self.steps[oldest]
            self.metrics_file.forget(oldest + 1)

    @property
    def newest(self) -> dict[str, Any]:
        """Record of the newest step, without its timeline spans; empty before the first."""
        return next(reversed(self.steps.values()), {})

    def _compare(self, step: int, replayed: dict[str, float]) -> None:
        """Compare the loss of a step trained again after a restart (`replayed`: its metrics) with the logged one, and
        count the result in `replays`. If they differ, warn that the weights are no longer the published ones."""
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
        divisor = max(1, len(samples))
        ages = tokens_by_age(groups, step)
        sizes = [sample.sampled_tokens for sample in samples]
        lengths = Counter(sizes)
        created = ledger.cohorts.created - self._settled
        self._settled = ledger.cohorts.created.copy()
        drift = self._measure_drift(ledger, now)
        gaps, learner = split_gaps(learner, step)
        counts, self._step = self._step, StepCounts()
        return {
            "step": step + 1,
            "time": round(now, 3),
            "reward": round(sum(sample.reward for sample in samples if sample.reward is not None) / divisor, 6),
            "reward_details": mean_details(samples),
            "groups": len(groups),
            "samples": len(samples),
            "tokens": sum(sizes),
            "rollout_s": round(counts.generating_s, 4),
            "rollout_tokens": counts.tokens,
            "rollout_tokens_per_s": per_second(counts.tokens, counts.generating_s),
            "staleness": describe_ages(ages) | {"bound": ledger.rules.max_staleness},
            "slots": counts.slots.means(),
            "disk_free_bytes": free_bytes(self.run_dir),
            "lengths": {
                "trained": describe_lengths(lengths),
                "truncated_share": round(sum(each.finish_reason == "length" for each in samples) / divisor, 6),
                "trained_histogram": length_histogram(lengths),
                "created_histogram": length_histogram(created),
                "drift": drift and drift.to_json(),
            },
            "tokens_ledger": self.account(ledger),
            "round": {
                "partials_waiting": ledger.open_samples.count(SampleState.PARTIAL),
                "surplus_groups": len(ledger.ready),
                "aborted_samples": counts.aborted,
                "moved_samples": counts.moved,
            },
            "environment": {name: counts.environment[name] for name in ("observations", "tokens", "failed")},
            "discarded_groups": discarded_groups(ledger),
            "gradient": gradient_shares(learner),
            "engine_gaps": gaps,
            "timeline": counts.spans,
            "learner": learner,
        }

    def _measure_drift(self, ledger: Ledger, now: float) -> LengthDrift | None:
        """Measure the drift of response lengths, at most every `DRIFT_S` seconds, since that blocks the broker's loop
        for a while."""
        if now >= self._drift_due:
            self._drift, self._drift_due = drift_of(ledger.cohorts), now + DRIFT_S
        return self._drift

    def record_evaluation(
        self,
        step: int,
        version: Version | None,
        evaluated: list[tuple[EvaluationSet, list[Group]]],
        held_slot_s: float,
    ) -> dict[str, Any]:
        """Record the evaluation of policy `step` on `version`; returns its result.

        `version`: None if no sample was generated. `evaluated`: each evaluation set with its groups. `held_slot_s`:
        slot-seconds that workers idled because they put off a weight update for it.

        The result holds the scores of the first set, as `describe_set` returns them. If sets have names of their own,
        `sets` holds those of each set by name.
        """
        scored_sets = [(each, describe_set(groups, each.samples, version)) for each, groups in evaluated]
        versions = sorted({of for _, groups in evaluated for of in versions_of(groups, version)})
        result = {
            "step": step,
            "time": round(clock.now(), 3),
            "version": version and list(version),
            "versions": [list(of) for of in versions],
            "held_slot_s": round(held_slot_s, 1),
            **scored_sets[0][1],
        }
        if any(each.number for each, _ in scored_sets):
            result["sets"] = {each.name: scores for each, scores in scored_sets}
        self.metrics_file.append_evaluation(result)
        self.sinks.evaluation(result, clock.now())
        return result

    def account(self, ledger: Ledger) -> dict[str, Any]:
        """The ledger's token account, together with the tokens that were never acknowledged and those that were
        refused."""
        return ledger.account.summary() | {
            "emitted_unacked": min(MAX_NUMBER, self.unacknowledged_before + self.peers.unacknowledged_tokens()),
            "refused": self.refused_before + self.peers.refused_tokens(),
        }

    def write_summary(self, ledger: Ledger, state: str, now: float, data: dict[str, int]) -> None:
        """Write summary.json; `state`: state of the run; `data`: counts of the training prompts."""
        last = [
            self.steps[step]["reward"]
            for step in range(ledger.steps.consumed - LAST_STEPS, ledger.steps.consumed)
            if step in self.steps
        ]
        summary = {
            "run": self.run,
            "state": state,
            "steps": ledger.steps.consumed,
            "max_steps": self.max_steps,
            "wall_s": round(self.wall_before_s + now - self.started_at, 2),
            "reward": {
                "first": self.sums.first_reward if last else None,
                "last3": round(sum(last) / len(last), 6) if last else None,
            },
            "evaluation": [ledger.evaluated[step] for step in sorted(ledger.evaluated)],
            "tokens": self.account(ledger),
            "gradient": {"tokens": self.sums.gradient_tokens, "empty_steps": self.sums.empty_steps}
            if "tokens" in self.newest.get("gradient", {})
            else None,
            "conversations": self.sums.conversations,
            "ledger_closed": ledger.account.closed,
            "rollout_tokens_per_s": per_second(
                self.sums.rollout_tokens + self._step.tokens, self.sums.generating_s + self._step.generating_s
            ),
            "staleness": describe_ages(self.sums.tokens_by_age),
            "buffer_peak": {"tokens": self.peak_tokens, "bytes": self.peak_tokens * BYTES_PER_TOKEN},
            "lengths": summarise_cohorts(ledger.cohorts),
            "data": data,
            "discarded_groups": discarded_groups(ledger),
            "failed_share": failed_share(ledger),
            "replays": dict(self.replays),
            "pace": self.pace,
            "starts": {"broker": ledger.serials.starts, "learner": ledger.learner.incarnation + 1},
        }
        replace_file(self.run_dir / "summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2))


def free_bytes(folder: Path) -> int | None:
    """Free bytes on the disk of a folder; None if the system does not say."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def same_loss(logged: float | None, replayed: float) -> bool:
    """Whether two losses agree within `REPLAY_TOLERANCE`; JSON stores a loss that is not finite as None."""
    if logged is None or not math.isfinite(logged):
        return not math.isfinite(replayed)
    return math.isclose(logged, replayed, rel_tol=REPLAY_TOLERANCE)


GAP_FIGURES = {"tokens", "mean", "largest", "age"}
"""Figures about each worker's gap, |its log-probability of a token - the learner's| (nats): number of tokens compared,
mean and largest gap, age in policy steps of the weights that sampled them. They come as learner metrics named
ENGINE_GAP_PREFIX + FIGURE + _ + WORKER."""

Figures = dict[str, float]


def split_gaps(learner: Figures, step: int) -> tuple[dict[str, Figures], Figures]:
    """Split the learner's metrics of batch `step`; returns (gaps, other metrics). `gaps` has, by worker, the figures
    about its log-probability gap, and the policy step that sampled the compared tokens."""
    gaps: dict[str, Figures] = {}
    for name, value in learner.items():
        if name.startswith(ENGINE_GAP_PREFIX):
            figure, _, worker = name.removeprefix(ENGINE_GAP_PREFIX).partition("_")
            gaps.setdefault(worker, {})[figure] = value
    rest = {name: value for name, value in learner.items() if not name.startswith(ENGINE_GAP_PREFIX)}
    return {worker: describe_gap(gap, step) for worker, gap in gaps.items() if gap.keys() == GAP_FIGURES}, rest


def describe_gap(gap: Figures, step: int) -> Figures:
    tokens, age = int(gap["tokens"]), int(gap["age"])
    return {"step": step - age, "age": age, "tokens": tokens, "mean": gap["mean"], "largest": gap["largest"]}


def gradient_shares(learner: dict[str, float]) -> dict[str, float]:
    """Shares of a batch's `tokens` and of its `groups` that had a gradient, 0 to 1; empty if the learner does not
    report them."""
    shares = {}
    for name, metric in (("tokens", "trained_tokens"), ("groups", "gradient_groups")):
        if metric in learner and name in learner:
            shares[name] = round(learner[metric] / max(1.0, learner[name]), 6)
    return shares


def discarded_groups(ledger: Ledger) -> dict[str, int]:
    """Number of groups discarded since the run began, by reason."""
    return {reason: ledger.account.counts[reason] for reason in sorted(ledger.account.discarded)}


def failed_share(ledger: Ledger) -> dict[str, float]:
    """Share (0 to 1) of prompts that failed for good; it reveals a reward function that fails on one kind of label.

    `training`: of the groups that were trained, or discarded because a sample used up its attempts. `evaluation`: of
    the prompts of the last evaluation. Both are 0 without such groups or prompts.
    """
    counts, last = ledger.account.counts, ledger.evaluated[max(ledger.evaluated)] if ledger.evaluated else {}
    failed = {"training": counts[DEAD_SAMPLE], "evaluation": last.get("failed", 0)}
    done = {"training": counts[GroupState.TRAINED], "evaluation": last.get("prompts", 0)}
    return {use: round(failed[use] / max(1, failed[use] + done[use]), 6) for use in failed}


def mean_details(samples: list[Sample]) -> dict[str, float]:
    """Mean of each named detail of the samples' rewards, by name, over the samples that have such a detail."""
    by_name: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in (sample.details or {}).items():
            by_name.setdefault(name, []).append(value)
    return {name: round(sum(values) / len(values), 6) for name, values in sorted(by_name.items())}


def tokens_by_age(groups: list[Group], step: int) -> Counter[int]:
    """Number of sampled tokens of batch `step` by staleness: `step` minus the policy step that sampled them."""
    ages: Counter[int] = Counter()
    for group in groups:
        for sample in group.samples_with_forks:
            if sample.state is SampleState.DONE:
                for _, _, _, _, tokens, observed, _, sampled_at in sample.chunk_refs:
                    if not observed:
                        ages[step - sampled_at] += tokens
    return ages


def describe_ages(ages: Mapping[int, int]) -> dict[str, Any]:
    """`mean` and `max` staleness in policy steps, and `tokens_by_age`. `ages`: number of tokens by staleness."""
    total = sum(ages.values())
    mean = sum(age * tokens for age, tokens in ages.items()) / total if total else 0.0
    return {
        "mean": round(mean, 4),
        "max": max(ages, default=0),
        "tokens_by_age": {str(age): ages[age] for age in sorted(ages)},
    }


def per_second(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 1) if seconds > 0 else 0.0


def read_summary(path: Path) -> dict[str, Any]:
    """Read summary.json as an earlier broker of the run wrote it; empty if there is none, or if it is damaged."""
    try:
        summary = orjson.loads(path.read_bytes()) if path.exists() else {}
    except orjson.JSONDecodeError as error:
        log.warning("%s is damaged (%s), and is written anew", path, error)
        return {}
    if not isinstance(summary, dict):
        log.warning("%s is no JSON object, and is written anew", path)
        return {}
    return summary
