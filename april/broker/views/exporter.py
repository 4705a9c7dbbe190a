"""Serves /metrics and /health over HTTP, in threads of its own.

The broker's loop hands over an immutable snapshot about once a second, by one assignment: it holds no lock, waits for
nobody, and a scrape costs it nothing.
"""

import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from itertools import accumulate

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from april.broker.views.health import HealthSnapshot, judge
from april.broker.views.metrics import METRICS, SYNC_BUCKETS_S, Histogram, Series
from april.processes import clock

SNAPSHOT_S = 1.0
"""Seconds between two metrics snapshots."""
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
    """HTTP server owned by the broker's loop; its threads only read `snapshot` and `passed_at`.

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
        self._server = HttpServer((host, port), handler(self, registry))
        self.address = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    def passed(self, now: float, read_snapshot: Callable[[], MetricsSnapshot]) -> None:
        """Note a pass of the broker's loop, and read a snapshot if one is due."""
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
        """Answer of /health: HTTP status and JSON body."""
        snapshot = self.snapshot
        if snapshot is None:
            return 503, {"status": "starting", "reason": "the broker has not come round for the first time"}
        healthy, body = judge(snapshot.health, self.pass_age_s, self.stuck_after_s)
        return (200 if healthy else 503), body

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; prometheus_client's interface of a collector."""
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


def handler(exporter: Exporter, registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
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
            """Log no line per request."""

    return Handler
