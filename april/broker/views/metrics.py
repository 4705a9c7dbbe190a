"""Prometheus metrics of a broker: their definitions, a reader of their values, and the HTTP server of /metrics and
/health."""

import bisect
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from itertools import accumulate
from typing import Literal

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from april.broker.context import BrokerContext
from april.broker.telemetry.evaluation import sets_of
from april.broker.views.status import HealthSnapshot, judge_health
from april.util import clock

Series = dict[tuple[str, ...], float]
"""Values of one metric, by the values of its labels."""

USES = ("training", "evaluation")
SYNC_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(frozen=True)
class MetricSpec:
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    "april_broker_starts": MetricSpec("gauge", "Starts of the broker in this run; a rise is a restart"),
    "april_steps": MetricSpec(
        "gauge",
        "Batches delivered, consumed by the learner, in its newest checkpoint, and wanted in the run",
        ("kind",),
    ),
    "april_round": MetricSpec("gauge", "The current round, from 0"),
    "april_samples": MetricSpec("gauge", "Samples of open groups by state", ("use", "state")),
    "april_groups": MetricSpec("gauge", "Training groups that are open, ready or delivered", ("state",)),
    "april_oldest_waiting_seconds": MetricSpec(
        "gauge", "Seconds since the oldest group with a waiting sample was opened"
    ),
    "april_oldest_waiting_steps": MetricSpec("gauge", "Age of the oldest waiting sample's group in policy steps"),
    "april_oldest_ready_steps": MetricSpec("gauge", "Age of the oldest complete group in policy steps"),
    "april_leases": MetricSpec("gauge", "Leases by what they are for: training, evaluation, or scoring only", ("use",)),
    "april_longest_lease_seconds": MetricSpec(
        "gauge", "Seconds since the oldest lease was granted, or the broker started"
    ),
    "april_chunks_accepted_total": MetricSpec("counter", "Chunks on disk since the broker started", ("use",)),
    "april_tokens_accepted_total": MetricSpec(
        "counter", "Tokens of the chunks on disk since the broker started", ("use",)
    ),
    "april_tokens_resumed_total": MetricSpec(
        "counter",
        "Prefixes leased again: to the worker that handed them back under the same weights (cached, where its engine "
        "has a prefix cache), or moved",
        ("prefix",),
    ),
    "april_samples_moved_total": MetricSpec(
        "counter", "Stragglers asked back for a worker with room, and moved there, since the broker started", ("what",)
    ),
    "april_tokens": MetricSpec(
        "gauge", "Generated training tokens by where they are now, without the discarded ones", ("place",)
    ),
    "april_tokens_discarded_total": MetricSpec("counter", "Training tokens discarded", ("reason",)),
    "april_groups_discarded_total": MetricSpec("counter", "Training groups discarded", ("reason",)),
    "april_tokens_lost_total": MetricSpec(
        "counter", "Tokens that engines sampled and that were never acknowledged, or were refused", ("why",)
    ),
    "april_ledger_closed": MetricSpec("gauge", "1 while generated = trained + delivered + ready + open + discarded"),
    "april_journal_bytes": MetricSpec("gauge", "Size of the journal on disk"),
    "april_journal_failed": MetricSpec("gauge", "1 while the journal cannot be written and the broker is read only"),
    "april_snapshots_failed_total": MetricSpec(
        "counter", "Snapshots that could not be written; each makes a restart read one more journal file"
    ),
    "april_staleness_steps": MetricSpec(
        "gauge", "Age in policy steps of the tokens of the newest trained batch, and its bound", ("kind",)
    ),
    "april_length_drift": MetricSpec(
        "gauge",
        "Kolmogorov-Smirnov distance between recently trained and recently created lengths, and the band of chance",
        ("kind",),
    ),
    "april_length_alarm": MetricSpec(
        "gauge", "1 while the distance is outside the band of chance: training lengths are biased"
    ),
    "april_alarms": MetricSpec(
        "gauge", "1 if the newest step raised the alarm, or its condition holds now", ("alarm",)
    ),
    "april_engine_gap_nats": MetricSpec(
        "gauge",
        "Difference between the learner's and a worker's log-probabilities, of its newest tokens in the newest batch",
        ("worker", "kind"),
    ),
    "april_engine_gap_age_steps": MetricSpec(
        "gauge",
        "Age in policy steps of the tokens behind april_engine_gap_nats; above 0 the policy has changed since",
        ("worker",),
    ),
    "april_reward": MetricSpec("gauge", "Mean reward of the newest trained batch"),
    "april_replayed_steps_total": MetricSpec(
        "counter", "Steps trained again after a restart, by whether the loss equals the logged one", ("loss",)
    ),
    "april_evaluation_accuracy": MetricSpec("gauge", "Accuracy of the newest evaluation"),
    "april_evaluation_set_accuracy": MetricSpec(
        "gauge", "Accuracy of the newest evaluation, by set of held-out prompts", ("set",)
    ),
    "april_evaluation_step": MetricSpec("gauge", "Policy step of the newest evaluation"),
    "april_sessions": MetricSpec("gauge", "Peers that are connected", ("role",)),
    "april_worker_leases": MetricSpec("gauge", "Samples that a worker generates", ("worker",)),
    "april_worker_capacity": MetricSpec("gauge", "Samples that a worker takes at once", ("worker",)),
    "april_worker_tokens_per_second": MetricSpec(
        "gauge", "Tokens acknowledged per second, since the last reading about a second ago", ("worker",)
    ),
    "april_worker_policy_step": MetricSpec(
        "gauge", "Policy step of the weights that a worker samples from", ("worker",)
    ),
    "april_scorer_leases": MetricSpec("gauge", "Responses, or whole groups, that a scorer scores", ("scorer",)),
    "april_scorer_capacity": MetricSpec("gauge", "Leases that a scorer takes at once", ("scorer",)),
    "april_refusals_total": MetricSpec("counter", "Messages that were not accepted", ("cause",)),
    "april_failed_handshakes_total": MetricSpec("counter", "Connections refused in the CURVE handshake", ("cause",)),
    "april_outbox_messages": MetricSpec("gauge", "Messages queued for peers that do not read at present"),
    "april_environment_failures_total": MetricSpec("counter", "Turns that an environment failed to answer"),
    "april_dead_letters_total": MetricSpec("counter", "Samples that failed for good, after their last attempt"),
    "april_dead_letters": MetricSpec(
        "gauge", "Groups of dead letters that can be re-queued, or wait to be drawn again", ("state",)
    ),
    "april_sinks_failed_total": MetricSpec(
        "counter", "Metrics sinks that raised an exception and were dropped", ("sink",)
    ),
    "april_drained": MetricSpec("gauge", "0 in operation, 1 while draining, 2 when nothing is leased any more"),
}
"""Metrics by name. The exporter adds two more: the histogram april_journal_sync_seconds and
april_last_pass_age_seconds."""


@dataclass(frozen=True)
class Histogram:
    counts: tuple[int, ...]
    """Number of observations in each bucket of SYNC_BUCKETS_S, and last of those above all buckets."""
    sum_s: float
    """Sum of all observations in seconds."""


class SyncTimes:
    """Durations of the journal's syncs since the broker started."""

    def __init__(self):
        self._counts = [0] * (len(SYNC_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(SYNC_BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def histogram(self) -> Histogram:
        return Histogram(tuple(self._counts), self._sum_s)


class MetricsReader:
    """Reads a broker's metrics. Results are never changed afterwards, so that other threads may read them."""

    def __init__(self):
        self._acknowledged: dict[str, int] = {}
        """Number of acknowledged tokens by worker uid at the last read."""
        self._read_at = 0.0

    def read(self, context: BrokerContext, outbox_messages: int, now: float) -> dict[str, Series]:
        ledger, queues, letters = context.ledger, context.queue_scanner.latest, context.ledger.dead_letters
        evaluating = sum(count for (_, evaluation), count in ledger.load.items() if evaluation)
        generating = ledger.generating
        account, acknowledged = context.recorder.account(ledger), context.recorder.acknowledged
        step = context.recorder.steps.get(ledger.consumed - 1, {})
        discarded = {reason: ledger.counts[reason] for reason in ledger.discarded}
        series: dict[str, Series] = {
            "april_broker_starts": single(ledger.starts),
            "april_steps": by_name(
                delivered=ledger.next_step,
                consumed=ledger.consumed,
                durable=ledger.durable,
                wanted=context.config.schedule.max_steps,
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
            "april_samples_moved_total": {(phase,): context.recorder.moves[phase] for phase in ("asked", "done")},
            "april_tokens": by_name(**{name: account[name] for name in ("trained", "delivered", "ready", "open")}),
            "april_tokens_discarded_total": by_name(**account["discarded"]),
            "april_groups_discarded_total": by_name(**discarded),
            "april_tokens_lost_total": by_name(unacknowledged=account["emitted_unacked"], refused=account["refused"]),
            "april_ledger_closed": single(ledger.closed),
            "april_journal_bytes": single(context.journal.bytes_on_disk),
            "april_journal_failed": single(bool(context.run.read_only)),
            "april_snapshots_failed_total": single(context.snapshots.failures),
            "april_staleness_steps": by_name(bound=ledger.rules.max_staleness),
            "april_replayed_steps_total": by_name(**context.recorder.replays),
            "april_sessions": by_name(**Counter(peer.role for peer in context.peers.by_id.values())),
            "april_refusals_total": by_name(**context.peers.refusals),
            "april_failed_handshakes_total": by_name(**context.failed_handshakes),
            "april_outbox_messages": single(outbox_messages),
            "april_environment_failures_total": single(context.recorder.environment["failed"]),
            "april_dead_letters_total": single(letters.total),
            "april_dead_letters": by_name(to_requeue=len(letters.discarded_groups()), waiting=len(letters.requeued)),
            "april_sinks_failed_total": {(name,): 1 for name in context.recorder.sinks.failed},
            "april_drained": single(ledger.draining + (ledger.draining and not ledger.leases)),
        }
        if step:
            series["april_reward"] = single(step["reward"])
            series["april_staleness_steps"] |= by_name(mean=step["staleness"]["mean"], max=step["staleness"]["max"])
            alarms, gaps = context.recorder.alarms, step.get("engine_gaps", {})
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
                (name,): scored["accuracy"]
                for name, scored in sets_of(newest).items()
                if scored["accuracy"] is not None
            }
            if newest["accuracy"] is not None:
                series["april_evaluation_accuracy"] = single(newest["accuracy"])
        return series | self._workers(context, now)

    def _workers(self, context: BrokerContext, now: float) -> dict[str, Series]:
        ledger, workers, scorers = context.ledger, context.peers.workers(), context.peers.scorers()
        acknowledged = {peer.uid: context.peers.tallies[peer.uid].acknowledged for peer in workers}
        since_s, before = now - self._read_at, self._acknowledged
        self._acknowledged, self._read_at = acknowledged, now
        return {
            "april_worker_leases": {
                (peer.name,): ledger.load[peer.uid, False] + ledger.load[peer.uid, True] for peer in workers
            },
            "april_worker_capacity": {(peer.name,): peer.capacity for peer in workers},
            "april_worker_tokens_per_second": {
                (peer.name,): (acknowledged[peer.uid] - before[peer.uid]) / since_s
                for peer in workers
                if peer.uid in before
            },
            "april_worker_policy_step": {(peer.name,): peer.version.step for peer in workers if peer.version},
            "april_scorer_leases": {(peer.name,): len(ledger.held.get(peer.uid, ())) for peer in scorers},
            "april_scorer_capacity": {(peer.name,): peer.capacity for peer in scorers},
        }


def single(value: float) -> Series:
    """The single value of a metric without labels, as a series."""
    return {(): value}


def by_name(**values: float) -> Series:
    """Values of a metric with one label, by the label's value, as a series."""
    return {(name,): value for name, value in values.items()}


# --- HTTP server ------------------------------------------------------------------------------------------------------


SNAPSHOT_S = 1.0
"""Interval between two metrics snapshots, seconds."""
CLIENT_TIMEOUT_S = 10.0
"""Seconds after which a client that does not send its request or read the answer is disconnected."""
FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


@dataclass(frozen=True)
class MetricsSnapshot:
    """Metrics and health of the broker at one moment; immutable."""

    health: HealthSnapshot
    series: dict[str, Series]
    syncs: Histogram


class Exporter:
    """HTTP server of /metrics and /health, owned by the broker's loop; the server's threads only read `snapshot` and
    `passed_at`.

    exporter = Exporter("127.0.0.1", 0, stuck_after_s=30.0)     # OSError: the address cannot be used
    exporter.passed(now, read_snapshot)                         # once a pass of the loop
    """

    def __init__(self, host: str, port: int, stuck_after_s: float):
        self.stuck_after_s = stuck_after_s
        self.snapshot: MetricsSnapshot | None = None
        self.passed_at = clock.now()
        self._next_snapshot = 0.0
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server = HttpServer((host, port), request_handler(self, registry))
        self.address = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    def passed(self, now: float, read_snapshot: Callable[[], MetricsSnapshot]) -> None:
        """Record the time of a pass of the broker's loop, and take a metrics snapshot if one is due."""
        self.passed_at = now
        if now >= self._next_snapshot:
            self.snapshot = read_snapshot()
            self._next_snapshot = now + SNAPSHOT_S

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    # --- in the HTTP threads --------------------------------------------------------------------------------

    @property
    def pass_age_s(self) -> float:
        """Seconds since the last pass of the broker's loop."""
        return max(0.0, clock.now() - self.passed_at)

    def health(self) -> tuple[int, dict]:
        """Answer to a request of /health: HTTP status and JSON body."""
        snapshot = self.snapshot
        if snapshot is None:
            return 503, {"status": "starting", "reason": "the broker has not come round for the first time"}
        healthy, body = judge_health(snapshot.health, self.pass_age_s, self.stuck_after_s)
        return (200 if healthy else 503), body

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families: the interface of a collector of prometheus_client."""
        yield GaugeMetricFamily(
            "april_last_pass_age_seconds", "Since the broker's loop came round last", value=self.pass_age_s
        )
        snapshot = self.snapshot
        if snapshot is None:
            return
        for name, series in snapshot.series.items():
            spec = METRICS[name]
            family = FAMILIES[spec.kind](name, spec.help, labels=spec.labels)
            for labels, value in series.items():
                family.add_metric(labels, value)
            yield family
        yield histogram_family(snapshot.syncs)


def histogram_family(syncs: Histogram) -> HistogramMetricFamily:
    bounds = [*map(str, SYNC_BUCKETS_S), "+Inf"]
    buckets = list(zip(bounds, accumulate(syncs.counts), strict=True))
    return HistogramMetricFamily(
        "april_journal_sync_seconds", "Time to put a drained batch of messages on disk", buckets, syncs.sum_s
    )


class HttpServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        """Ignore errors of clients that disconnect."""


def request_handler(exporter: Exporter, registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, content_type, encode(registry))
            elif path == "/health":
                status, body = exporter.health()
                self._answer(status, "application/json", orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE))
            else:
                self._answer(404, "text/plain; charset=utf-8", b"ask for /metrics or /health\n")

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments) -> None:
            """Override that logs nothing, so that requests do not fill the log."""

    return Handler
