"""The lives of kept samples at a collector of OpenTelemetry, as OTLP over HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pyarrow.parquet as parquet
import pytest

from april.cli import main
from tests.support.dashboard_runs import make_run


@pytest.fixture
def collector():
    """Its address, and what it has been sent."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", requests
    server.shutdown()
    server.server_close()


def spans_of(requests):
    """By trace: the sample's span, and those below it."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    traces = {}
    for body in requests:
        for span in ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans:
            traces.setdefault(span.trace_id, []).append(span)
    return traces


def told(span):
    values = {item.key.removeprefix("april."): item.value for item in span.attributes}
    return {name: getattr(value, value.WhichOneof("value")) for name, value in values.items()}


@pytest.mark.skipif(not find_spec("opentelemetry"), reason="needs opentelemetry-sdk")
def test_each_kept_sample_is_a_trace_of_its_spans(collector, tmp_path, capsys):
    address, requests = collector
    run = make_run(tmp_path, steps=2)
    rows = [row for step in (1, 2) for row in lives(run, step)]
    assert main(["trace", "send", str(run), "--out", address]) == 0
    assert f"{len(rows)} traces were sent" in capsys.readouterr().out
    found = {}
    for spans in spans_of(requests).values():
        (whole,) = [span for span in spans if not span.parent_span_id]
        below = [span for span in spans if span.parent_span_id == whole.span_id]
        assert len(below) == len(spans) - 1
        key = tuple(told(whole)[name] for name in ("step", "group", "index"))
        found[key] = whole, sorted(below, key=lambda span: span.start_time_unix_nano)
    assert len(found) == len(rows)
    for row in rows:
        whole, below = found[row["step"], row["group"], row["index"]]
        assert told(whole)["reward"] == row["reward"]
        assert whole.start_time_unix_nano == pytest.approx(row["opened_at"] * 1e9, abs=1e3)
        assert whole.end_time_unix_nano >= row["delivered_at"] * 1e9 - 1e3
        assert [(span.name, told(span)["where"], told(span)["how"]) for span in below] == [
            (own["what"], own["where"], own["how"]) for own in sorted(row["spans"], key=lambda own: own["began"])
        ]
    before = set(spans_of(requests))
    main(["trace", "send", str(run), "--out", address])
    assert set(spans_of(requests)) == before


def lives(run, step):
    return parquet.read_table(run / f"samples/step_{step:06d}.parquet", columns=list(LIVES)).to_pylist()


LIVES = ("step", "group", "index", "reward", "spans", "opened_at", "delivered_at")
