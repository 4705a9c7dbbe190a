"""HTTP endpoints of a broker: Prometheus metrics at /metrics and health at /health, both made from the newest
`RunStatus`."""

import bisect
import socketserver
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from april.broker.telemetry.evaluation import sets_of
from april.broker.views.status import USES, RunStatus
from april.util import clock
from april.util.lifetime import PartThread
from april.wire.security.web_requests import CheckedRequestHandler, names_of

SYNC_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Histogram(NamedTuple):
    counts: tuple[int, ...] = (0,) * (len(SYNC_BUCKETS_S) + 1)
    """Number of observations in each bucket of SYNC_BUCKETS_S, and last of those above all buckets."""
    sum_s: float = 0.0
    """Sum of all observations in seconds."""

    def add(self, seconds: float) -> "Histogram":
        """The histogram with one more observation, such as the duration of a sync of the journal."""
        counts = list(self.counts)
        counts[bisect.bisect_left(SYNC_BUCKETS_S, seconds)] += 1
        return Histogram(tuple(counts), self.sum_s + seconds)


class MetricsSnapshot(NamedTuple):
    """Values from which the Prometheus metrics are made."""

    run: RunStatus
    before: RunStatus | None = None
    """The status of the snapshot before, about a second older; None in the first snapshot."""
    outbox_messages: int = 0
    """Messages queued for peers that do not read at present."""
    syncs: Histogram = Histogram()
    """Durations of the journal's syncs since the broker started."""


# --- metrics ----------------------------------------------------------------------------------------------------------


Series = dict[tuple[str, ...], float]
"""Values of one metric; each key is a tuple with the value of each of its labels, in order."""
Values = float | Mapping[str, float] | Mapping[tuple[str, str], float] | None
"""Values of a metric: a number without labels; with one label or two, a number for each value or pair of values of the
labels. None while the metric has no value."""


@dataclass(frozen=True)
class MetricSpec:
    kind: Literal["gauge", "counter"]
    help: str
    read: Callable[[MetricsSnapshot], Values]
    labels: tuple[str, ...]

    def series(self, snapshot: MetricsSnapshot) -> Series | None:
        values = self.read(snapshot)
        if values is None:
            return None
        if not isinstance(values, Mapping):
            return {(): values}
        return {key if isinstance(key, tuple) else (key,): value for key, value in values.items()}


def of_status(
    kind: Literal["gauge", "counter"], help: str, read: Callable[[RunStatus], Values], *labels: str
) -> MetricSpec:
    """A metric whose values come from the run's status. `read`: function that returns the values; `labels`: names of
    their labels."""
    return MetricSpec(kind, help, lambda snapshot: read(snapshot.run), labels)


gauge, counter = partial(of_status, "gauge"), partial(of_status, "counter")

METRICS: dict[str, MetricSpec] = {
    "april_broker_starts": gauge(
        "Starts of the broker in this run; a rise is a restart", lambda run: run.starts["broker"]
    ),
    "april_steps": gauge(
        "Batches delivered, consumed by the learner, in its newest checkpoint, and wanted in the run",
        lambda run: {"delivered": run.delivered, "consumed": run.step, "durable": run.durable, "wanted": run.max_steps},
        "kind",
    ),
    "april_round": gauge("The current round, from 0", lambda run: run.round),
    "april_samples": gauge(
        "Samples of open groups by state",
        lambda run: {(use, state): count for use in USES for state, count in getattr(run.queues, use).items()},
        "use",
        "state",
    ),
    "april_groups": gauge("Training groups that are open, ready or delivered", lambda run: run.groups, "state"),
    "april_oldest_waiting_seconds": gauge(
        "Seconds since the oldest group with a waiting sample was opened", lambda run: run.queues.oldest_waiting_s
    ),
    "april_oldest_waiting_steps": gauge(
        "Age of the oldest waiting sample's group in policy steps", lambda run: run.queues.oldest_waiting_steps
    ),
    "april_oldest_ready_steps": gauge(
        "Age of the oldest complete group in policy steps", lambda run: run.queues.oldest_ready_steps
    ),
    "april_leases": gauge(
        "Leases by what they are for: training, evaluation, or scoring only",
        lambda run: {
            "training": run.leased,
            "evaluation": run.evaluating,
            "scoring": run.leases - run.leased - run.evaluating,
        },
        "use",
    ),
    "april_longest_lease_seconds": gauge(
        "Seconds since the oldest lease was granted, or the broker started", lambda run: run.queues.longest_lease_s
    ),
    "april_chunks_accepted_total": counter(
        "Chunks on disk since the broker started", lambda run: run.accepted["chunks"], "use"
    ),
    "april_tokens_accepted_total": counter(
        "Tokens of the chunks on disk since the broker started", lambda run: run.accepted["tokens"], "use"
    ),
    "april_tokens_resumed_total": counter(
        "Prefixes leased again: to the worker that handed them back under the same weights (cached, where its engine "
        "has a prefix cache), or moved",
        lambda run: run.resumed,
        "prefix",
    ),
    "april_samples_moved_total": counter(
        "Stragglers asked back for a worker with room, and moved there, since the broker started",
        lambda run: run.moves,
        "what",
    ),
    "april_tokens": gauge(
        "Generated training tokens by where they are now, without the discarded ones",
        lambda run: {place: run.tokens[place] for place in ("trained", "delivered", "ready", "open")},
        "place",
    ),
    "april_tokens_discarded_total": counter("Training tokens discarded", lambda run: run.tokens["discarded"], "reason"),
    "april_groups_discarded_total": counter("Training groups discarded", lambda run: run.groups_discarded, "reason"),
    "april_tokens_lost_total": counter(
        "Tokens that engines sampled and that were never acknowledged, or were refused",
        lambda run: {"unacknowledged": run.tokens["emitted_unacked"], "refused": run.tokens["refused"]},
        "why",
    ),
    "april_ledger_closed": gauge(
        "1 while generated = trained + delivered + ready + open + discarded", lambda run: run.ledger_closed
    ),
    "april_journal_bytes": gauge("Size of the journal on disk", lambda run: run.journal_bytes),
    "april_journal_failed": gauge(
        "1 while the journal cannot be written and the broker is read only", lambda run: bool(run.read_only)
    ),
    "april_snapshots_failed_total": counter(
        "Snapshots that could not be written; each makes a restart read one more journal file",
        lambda run: run.failed_snapshots,
    ),
    "april_journal_reads_refused_total": counter(
        "Reads of the journal that the system refused; each was tried again", lambda run: run.refused_reads
    ),
    "april_staleness_steps": gauge(
        "Age in policy steps of the tokens of the newest trained batch, and its bound",
        lambda run: (
            {"bound": run.max_staleness}
            | ({kind: run.staleness[kind] for kind in ("mean", "max")} if run.reward is not None else {})
        ),
        "kind",
    ),
    "april_length_drift": gauge(
        "Kolmogorov-Smirnov distance between recently trained and recently created lengths, and the band of chance",
        lambda run: run.length_drift and {kind: run.length_drift[kind] for kind in ("distance", "band")},
        "kind",
    ),
    "april_length_alarm": gauge(
        "1 while the distance is outside the band of chance: training lengths are biased",
        lambda run: run.length_drift and run.length_drift["alarm"],
    ),
    "april_alarms": gauge(
        "1 if the newest step raised the alarm, or its condition holds now",
        lambda run: dict.fromkeys(run.alarm_names, 0) | {alarm["name"]: 1 for alarm in (*run.step_alarms, *run.alarms)},
        "alarm",
    ),
    "april_engine_gap_nats": gauge(
        "Difference between the learner's and a worker's log-probabilities, of its newest tokens in the newest batch",
        lambda run: {
            (worker, kind): gap[kind]
            for worker, gap in run.engine_gaps.items()
            for kind in ("mean", "largest")
            if gap[kind] is not None
        },
        "worker",
        "kind",
    ),
    "april_engine_gap_age_steps": gauge(
        "Age in policy steps of the tokens behind april_engine_gap_nats; above 0 the policy has changed since",
        lambda run: {worker: gap["age"] for worker, gap in run.engine_gaps.items()},
        "worker",
    ),
    "april_reward": gauge("Mean reward of the newest trained batch", lambda run: run.reward),
    "april_replayed_steps_total": counter(
        "Steps trained again after a restart, by whether the loss equals the logged one",
        lambda run: run.replays,
        "loss",
    ),
    "april_evaluation_accuracy": gauge(
        "Accuracy of the newest evaluation, if it is known which responses were correct",
        lambda run: newest_evaluation(run).get("accuracy"),
    ),
    "april_evaluation_reward": gauge(
        "Mean reward of the newest evaluation, before penalties", lambda run: newest_evaluation(run).get("reward")
    ),
    "april_evaluation_set_accuracy": gauge(
        "Accuracy of the newest evaluation, by set of held-out prompts",
        lambda run: {
            name: scored["accuracy"]
            for name, scored in sets_of(newest_evaluation(run)).items()
            if scored.get("accuracy") is not None
        },
        "set",
    ),
    "april_evaluation_step": gauge(
        "Policy step of the newest evaluation", lambda run: newest_evaluation(run).get("step")
    ),
    "april_evaluation_not_evaluated": gauge(
        "Held-out prompts of the newest evaluation that could not be generated under its version in time, by set",
        lambda run: {
            name: scored["not_evaluated"]
            for name, scored in sets_of(newest_evaluation(run)).items()
            if "not_evaluated" in scored
        },
        "set",
    ),
    "april_evaluation_held_slot_seconds": gauge(
        "Free slots, times seconds, of workers that put newer weights off for the newest evaluation",
        lambda run: newest_evaluation(run).get("held_slot_s"),
    ),
    "april_sessions": gauge("Peers that are connected", lambda run: run.sessions, "role"),
    "april_worker_leases": gauge(
        "Samples that a worker generates", lambda run: {worker.name: worker.leased for worker in run.workers}, "worker"
    ),
    "april_worker_capacity": gauge(
        "Samples that a worker takes at once",
        lambda run: {worker.name: worker.capacity for worker in run.workers},
        "worker",
    ),
    "april_worker_tokens_per_second": MetricSpec(
        "gauge",
        "Tokens acknowledged per second, since the last reading about a second ago",
        lambda snapshot: acknowledged_per_second(snapshot.run, snapshot.before),
        ("worker",),
    ),
    "april_worker_policy_step": gauge(
        "Policy step of the weights that a worker samples from",
        lambda run: {worker.name: worker.policy_step for worker in run.workers if worker.policy_step is not None},
        "worker",
    ),
    "april_scorer_leases": gauge(
        "Responses, or whole groups, that a scorer scores",
        lambda run: {scorer.name: scorer.leased for scorer in run.scorers},
        "scorer",
    ),
    "april_scorer_capacity": gauge(
        "Leases that a scorer takes at once",
        lambda run: {scorer.name: scorer.capacity for scorer in run.scorers},
        "scorer",
    ),
    "april_refusals_total": counter("Messages that were not accepted", lambda run: run.refusals, "cause"),
    "april_failed_handshakes_total": counter(
        "Connections refused in the CURVE handshake", lambda run: run.failed_handshakes, "cause"
    ),
    "april_outbox_messages": MetricSpec(
        "gauge",
        "Messages queued for peers that do not read at present",
        lambda snapshot: snapshot.outbox_messages,
        (),
    ),
    "april_environment_failures_total": counter(
        "Turns that an environment failed to answer", lambda run: run.environment_failures
    ),
    "april_dead_letters_total": counter(
        "Samples that failed for good, after their last attempt", lambda run: run.dead_letters["total"]
    ),
    "april_dead_letters": gauge(
        "Groups of dead letters that can be re-queued, or wait to be drawn again",
        lambda run: {state: run.dead_letters[state] for state in ("to_requeue", "waiting")},
        "state",
    ),
    "april_sinks_failed_total": counter(
        "Metrics sinks that raised an exception and were dropped",
        lambda run: dict.fromkeys(run.failed_sinks, 1),
        "sink",
    ),
    "april_drained": gauge(
        "0 in operation, 1 while draining, 2 when nothing is leased any more",
        lambda run: bool(run.drain) + bool(run.drain and not run.leases),
    ),
}
"""Metrics by name. The exporter adds two more: the histogram april_journal_sync_seconds and
april_last_pass_age_seconds."""


def series(snapshot: MetricsSnapshot) -> dict[str, Series]:
    """The values of all metrics that have any: metric name -> {values of the metric's labels: value}."""
    found = ((name, spec.series(snapshot)) for name, spec in METRICS.items())
    return {name: values for name, values in found if values is not None}


def newest_evaluation(run: RunStatus) -> dict[str, Any]:
    """Result of the evaluation at the latest step; empty before the first."""
    return max(run.evaluation, key=lambda result: result["step"], default={})


def acknowledged_per_second(run: RunStatus, before: RunStatus | None) -> dict[str, float]:
    """Tokens acknowledged per second since the status `before`, by name of the worker, for the workers that are in both
    statuses; {} if `before` is None."""
    known = {worker.uid: worker.acknowledged for worker in before.workers} if before else {}
    return {
        worker.name: (worker.acknowledged - known[worker.uid]) / (run.at - before.at)
        for worker in run.workers
        if before and worker.uid in known
    }


# --- health -----------------------------------------------------------------------------------------------------------


PAUSE_REASONS = {
    "waiting for weights": "no worker holds weights that it may sample from; the learner has to publish them",
    "handing out": "nothing is leased, though workers have weights; if that lasts, they have no room",
    "training": "the learner has the next batch to train; generation goes on when its weights arrive",
    "scoring": "everything that was generated waits for its score",
    "draining": "drained by an operator: leases are still coming back",
    "drained": "drained by an operator: nothing is handed out until `april drain --end`",
    "finished": "the run is over; workers and learner are leaving",
}


def judge_health(run: RunStatus, pass_age_s: float, stuck_after_s: float) -> tuple[bool, dict[str, Any]]:
    """Judge the broker's health: (healthy, body of /health). `pass_age_s`: seconds since the last pass of the broker's
    loop. `stuck_after_s`: seconds without a pass after which the loop counts as stuck."""
    if pass_age_s > stuck_after_s:
        problem = (
            f"the broker's loop has not come round for {pass_age_s:.0f} s; its disk may hang, or it may be stopped"
        )
    else:
        problem = run.read_only or (f"the run has failed: {run.over}" if run.state == "failed" else "")
    return not problem, {
        "status": "failing" if problem else "ok",
        "reason": problem or pause_reason(run),
        "run": run.run,
        "state": run.state,
        "phase": run.phase,
        "step": run.step,
        "workers": len(run.workers),
        "learner_silent_s": run.learner_silent_s,
        "last_pass_age_s": round(pass_age_s, 1),
    }


def pause_reason(run: RunStatus) -> str:
    """Reason for which nothing is generated or scored at the moment; empty if generation goes on."""
    if run.phase in ("draining", "drained", "finished"):
        return PAUSE_REASONS[run.phase]
    if run.learner_silent_s is None:
        return "no learner is connected; generation goes on as far as the staleness bound permits"
    if not run.workers:
        return "no worker is connected"
    if run.lacks_scorers:
        return "no scorer is connected; responses wait for their scores"
    return PAUSE_REASONS.get(run.phase, "")


# --- HTTP server ------------------------------------------------------------------------------------------------------


SNAPSHOT_S = 1.0
"""Interval between two metrics snapshots, seconds."""
CLIENT_TIMEOUT_S = 10.0
"""Seconds after which a client that does not send its request or read the answer is disconnected."""
FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


class Exporter:
    """HTTP server of /metrics and /health, owned by the broker's loop; the server's threads only read `snapshot` and
    `passed_at`.

    exporter = Exporter("127.0.0.1", 0, stuck_after_s=30.0)     # OSError: the address cannot be used
    exporter.passed(now, take_snapshot)                         # once a pass of the loop
    """

    def __init__(self, host: str, port: int, stuck_after_s: float, host_names: Iterable[str] = ()):
        """`host_names`: further names by which clients address the server. `stuck_after_s`: seconds without a pass of
        the broker's loop after which /health reports it as stuck."""
        self.stuck_after_s = stuck_after_s
        self.snapshot: MetricsSnapshot | None = None
        self.passed_at = clock.now()
        self._next_snapshot = 0.0
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server = HttpServer((host, port), request_handler(self, registry, names_of(host, *host_names)))
        self.address = f"http://{host}:{self._server.server_address[1]}"
        PartThread("http", self._server.serve_forever, 0.02).start()  # looks so often (s) whether it is to end

    def passed(self, now: float, take_snapshot: Callable[[RunStatus | None], MetricsSnapshot]) -> None:
        """Record the time of a pass of the broker's loop, and take a metrics snapshot every `SNAPSHOT_S`.
        `take_snapshot`: function that makes one, given the status in the last snapshot (None at first)."""
        self.passed_at = now
        if now >= self._next_snapshot:
            self.snapshot = take_snapshot(self.snapshot and self.snapshot.run)
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
        healthy, body = judge_health(snapshot.run, self.pass_age_s, self.stuck_after_s)
        return (200 if healthy else 503), body

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families: the interface of a collector of prometheus_client."""
        yield GaugeMetricFamily(
            "april_last_pass_age_seconds", "Since the broker's loop came round last", value=self.pass_age_s
        )
        snapshot = self.snapshot
        if snapshot is None:
            return
        for name, values in series(snapshot).items():
            spec = METRICS[name]
            family = FAMILIES[spec.kind](name, spec.help, labels=spec.labels)
            for labels, value in values.items():
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


def request_handler(
    exporter: Exporter, registry: CollectorRegistry, host_names: frozenset[str]
) -> type[CheckedRequestHandler]:
    class Handler(CheckedRequestHandler):
        names = host_names
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
