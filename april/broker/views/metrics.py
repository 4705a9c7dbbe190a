"""The figures that a broker shows to Prometheus: what there is, and a picture of it at one moment."""

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from april.broker.books import Books
from april.broker.telemetry.evaluation import sets_of

Series = dict[tuple[str, ...], float]
"""values by those of the labels"""

USES = ("training", "evaluation")
SYNC_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(frozen=True)
class Metric:
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    "april_broker_starts": Metric("gauge", "Starts of the broker in this run; a rise is a restart"),
    "april_steps": Metric(
        "gauge", "Batches delivered, consumed by the learner, in its newest checkpoint, wanted", ("kind",)
    ),
    "april_round": Metric("gauge", "The current round, from 0"),
    "april_samples": Metric("gauge", "Samples of open groups by state", ("use", "state")),
    "april_groups": Metric("gauge", "Training groups that are open, ready or delivered", ("state",)),
    "april_oldest_waiting_seconds": Metric("gauge", "Since the group of the longest waiting sample was opened"),
    "april_oldest_waiting_steps": Metric("gauge", "Age of the oldest waiting sample's group in policy steps"),
    "april_oldest_ready_steps": Metric("gauge", "Age of the oldest complete group in policy steps"),
    "april_leases": Metric("gauge", "Leases by what they are for: training, evaluation, or scoring only", ("use",)),
    "april_longest_lease_seconds": Metric("gauge", "Since the oldest lease was granted, or the broker started"),
    "april_chunks_accepted_total": Metric("counter", "Chunks made durable since the broker started", ("use",)),
    "april_tokens_accepted_total": Metric("counter", "Their tokens", ("use",)),
    "april_tokens_resumed_total": Metric(
        "counter",
        "Prefixes leased again: to the worker that handed them back under the same weights (cached, where its engine "
        "has a prefix cache), or moved",
        ("prefix",),
    ),
    "april_samples_moved_total": Metric(
        "counter", "Stragglers asked back for a worker with room, and moved there, since the broker started", ("what",)
    ),
    "april_tokens": Metric("gauge", "Where the generated training tokens are that were not discarded", ("place",)),
    "april_tokens_discarded_total": Metric("counter", "Training tokens discarded", ("reason",)),
    "april_groups_discarded_total": Metric("counter", "Training groups discarded", ("reason",)),
    "april_tokens_lost_total": Metric("counter", "Tokens emitted and never acknowledged, or refused", ("why",)),
    "april_ledger_closed": Metric("gauge", "1 while generated = trained + delivered + ready + open + discarded"),
    "april_journal_bytes": Metric("gauge", "Size of the journal on disk"),
    "april_journal_failed": Metric("gauge", "1 when the journal can be written no more and the broker only answers"),
    "april_snapshots_failed_total": Metric("counter", "Snapshots that could not be written; restarts read more"),
    "april_staleness_steps": Metric("gauge", "Age of the tokens of the newest trained batch, and its bound", ("kind",)),
    "april_length_drift": Metric(
        "gauge",
        "Distance of the lengths trained lately from those created, and the most that chance explains",
        ("kind",),
    ),
    "april_length_alarm": Metric("gauge", "1 when the distance is beyond what chance explains: lengths are biased"),
    "april_alarms": Metric("gauge", "1 when the alarm was raised in the newest step, or is so just now", ("alarm",)),
    "april_engine_gap_nats": Metric(
        "gauge",
        "Distance of the learner's log-probabilities from the worker's, of its newest tokens in the newest batch",
        ("worker", "kind"),
    ),
    "april_engine_gap_age_steps": Metric(
        "gauge", "Age of those tokens; above 0 the policy has moved since", ("worker",)
    ),
    "april_reward": Metric("gauge", "Mean reward of the newest trained batch"),
    "april_replayed_steps_total": Metric(
        "counter", "Steps trained again after a restart, with the loss that was logged or another", ("loss",)
    ),
    "april_evaluation_accuracy": Metric("gauge", "Accuracy of the newest evaluation"),
    "april_evaluation_set_accuracy": Metric("gauge", "Accuracy of the newest evaluation by set", ("set",)),
    "april_evaluation_step": Metric("gauge", "Policy step of the newest evaluation"),
    "april_sessions": Metric("gauge", "Peers that are connected", ("role",)),
    "april_worker_leases": Metric("gauge", "Samples that a worker generates", ("worker",)),
    "april_worker_capacity": Metric("gauge", "Samples that a worker takes at once", ("worker",)),
    "april_worker_tokens_per_second": Metric("gauge", "Tokens acknowledged in the last second or so", ("worker",)),
    "april_worker_policy_step": Metric("gauge", "Step of the weights that a worker samples from", ("worker",)),
    "april_scorer_leases": Metric("gauge", "Responses, or whole groups, that a scorer scores", ("scorer",)),
    "april_scorer_capacity": Metric("gauge", "Leases that a scorer takes at once", ("scorer",)),
    "april_refusals_total": Metric("counter", "Messages that were not accepted", ("cause",)),
    "april_failed_handshakes_total": Metric("counter", "Connections that were not let in", ("cause",)),
    "april_outbox_messages": Metric("gauge", "Messages kept for peers that do not read at present"),
    "april_environment_failures_total": Metric("counter", "Turns that an environment did not answer"),
    "april_dead_letters_total": Metric("counter", "Samples that used up their attempts"),
    "april_dead_letters": Metric("gauge", "Dead groups that can be re-queued, or wait to be drawn again", ("state",)),
    "april_sinks_failed_total": Metric("counter", "Metrics sinks that raised and are left out", ("sink",)),
    "april_drained": Metric("gauge", "0 in operation, 1 while draining, 2 when nothing is leased any more"),
}
"""beside them april_journal_sync_seconds, a histogram, and april_last_pass_age_seconds"""


@dataclass(frozen=True)
class Histogram:
    counts: tuple[int, ...]
    """observations in each bucket of SYNC_BUCKETS_S, and above the last"""
    sum_s: float


class SyncTimes:
    """How long the journal's syncs took, since the broker started."""

    def __init__(self):
        self._counts = [0] * (len(SYNC_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(SYNC_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def picture(self) -> Histogram:
        return Histogram(tuple(self._counts), self._sum_s)


class Photographer:
    """Reads a broker's figures; what it returns is never changed afterwards, so other threads may have it."""

    def __init__(self):
        self._acknowledged: dict[str, int] = {}
        self._at = 0.0

    def read(self, books: Books, outbox_messages: int, now: float) -> dict[str, Series]:
        ledger, queues, letters = books.ledger, books.census.latest, books.ledger.dead_letters
        evaluating = sum(count for (_, evaluation), count in ledger.load.items() if evaluation)
        generating = ledger.generating
        account, acknowledged = books.recorder.account(ledger), books.recorder.acknowledged
        step = books.recorder.steps.get(ledger.consumed - 1, {})
        discarded = {reason: ledger.counts[reason] for reason in ledger.discarded}
        series: dict[str, Series] = {
            "april_broker_starts": single(ledger.starts),
            "april_steps": by_name(
                delivered=ledger.next_step,
                consumed=ledger.consumed,
                durable=ledger.durable,
                wanted=books.config.schedule.max_steps,
            ),
            "april_round": single(ledger.round),
            "april_samples": {
                **{("training", state): count for state, count in queues.training.items()},
                **{("evaluation", state): count for state, count in queues.evaluation.items()},
            },
            "april_groups": {(state,): ledger.counts[state] for state in ("open", "ready", "delivered")},
            "april_oldest_waiting_seconds": single(queues.oldest_waiting_s),
            "april_oldest_waiting_steps": single(queues.oldest_waiting_steps),
            "april_oldest_ready_steps": single(queues.oldest_ready_steps),
            "april_leases": by_name(
                training=generating, evaluation=evaluating, scoring=len(ledger.leases) - generating - evaluating
            ),
            "april_longest_lease_seconds": single(queues.longest_lease_s),
            "april_chunks_accepted_total": {(use,): acknowledged.get(("chunks", use), 0) for use in USES},
            "april_tokens_accepted_total": {(use,): acknowledged.get(("tokens", use), 0) for use in USES},
            "april_tokens_resumed_total": by_name(cached=ledger.resumed["cached"], moved=ledger.resumed["moved"]),
            "april_samples_moved_total": {(what,): books.recorder.moves[what] for what in ("asked", "done")},
            "april_tokens": by_name(**{name: account[name] for name in ("trained", "delivered", "ready", "open")}),
            "april_tokens_discarded_total": by_name(**account["discarded"]),
            "april_groups_discarded_total": by_name(**discarded),
            "april_tokens_lost_total": by_name(unacknowledged=account["emitted_unacked"], refused=account["refused"]),
            "april_ledger_closed": single(ledger.closed),
            "april_journal_bytes": single(books.journal.bytes_on_disk),
            "april_journal_failed": single(bool(books.run.read_only)),
            "april_snapshots_failed_total": single(books.snapshots.failures),
            "april_staleness_steps": by_name(bound=ledger.rules.max_staleness),
            "april_replayed_steps_total": by_name(**books.recorder.replays),
            "april_sessions": by_name(**Counter(session.role for session in books.sessions.by_id.values())),
            "april_refusals_total": by_name(**books.sessions.refusals),
            "april_failed_handshakes_total": by_name(**books.failed_handshakes),
            "april_outbox_messages": single(outbox_messages),
            "april_environment_failures_total": single(books.recorder.environment["failed"]),
            "april_dead_letters_total": single(letters.total),
            "april_dead_letters": by_name(to_requeue=len(letters.discarded_groups()), waiting=len(letters.waiting)),
            "april_sinks_failed_total": {(name,): 1 for name in books.recorder.sinks.failed},
            "april_drained": single(ledger.draining + (ledger.draining and not ledger.leases)),
        }
        if step:
            series["april_reward"] = single(step["reward"])
            series["april_staleness_steps"] |= by_name(mean=step["staleness"]["mean"], max=step["staleness"]["max"])
            alarms, gaps = books.recorder.alarms, step.get("engine_gaps", {})
            raised = {alarm["name"] for alarm in (*step.get("alarms", ()), *alarms.raised)}
            series["april_alarms"] = {(name,): name in raised for name in alarms.names}
            series["april_engine_gap_nats"] = {
                (worker, kind): gap[kind] for worker, gap in gaps.items() for kind in ("mean", "largest")
            }
            series["april_engine_gap_age_steps"] = {(worker,): gap["age"] for worker, gap in gaps.items()}
            if drift := step["lengths"].get("drift"):
                series["april_length_drift"] = by_name(distance=drift["distance"], band=drift["band"])
                series["april_length_alarm"] = single(drift["alarm"])
        if ledger.evaluated:
            newest = ledger.evaluated[max(ledger.evaluated)]
            series["april_evaluation_step"] = single(newest["step"])
            series["april_evaluation_set_accuracy"] = {
                (name,): found["accuracy"] for name, found in sets_of(newest).items() if found["accuracy"] is not None
            }
            if newest["accuracy"] is not None:
                series["april_evaluation_accuracy"] = single(newest["accuracy"])
        return series | self._workers(books, now)

    def _workers(self, books: Books, now: float) -> dict[str, Series]:
        ledger, workers, scorers = books.ledger, books.sessions.workers(), books.sessions.scorers()
        acknowledged = {session.uid: books.sessions.tallies[session.uid].acknowledged for session in workers}
        since_s, before = now - self._at, self._acknowledged
        self._acknowledged, self._at = acknowledged, now
        return {
            "april_worker_leases": {
                (session.name,): ledger.load[session.uid, False] + ledger.load[session.uid, True] for session in workers
            },
            "april_worker_capacity": {(session.name,): session.capacity for session in workers},
            "april_worker_tokens_per_second": {
                (session.name,): (acknowledged[session.uid] - before[session.uid]) / since_s
                for session in workers
                if session.uid in before
            },
            "april_worker_policy_step": {
                (session.name,): session.version.step for session in workers if session.version
            },
            "april_scorer_leases": {(session.name,): len(ledger.held.get(session.uid, ())) for session in scorers},
            "april_scorer_capacity": {(session.name,): session.capacity for session in scorers},
        }


def single(value: float) -> Series:
    return {(): value}


def by_name(**values: float) -> Series:
    return {(name,): value for name, value in values.items()}
