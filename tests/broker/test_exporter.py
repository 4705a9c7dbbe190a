"""The HTTP endpoints /metrics and /health: of a real broker process, and of an exporter in each condition that a broker
can be in."""

import msgspec
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from april import config as configuration
from april.broker.views.metrics import SYNC_BUCKETS_S, Exporter, Histogram, MetricsSnapshot, histogram_family
from april.broker.views.status import RunStatus
from april.util import clock
from tests.support.http_get import get
from tests.support.page_client import Client, Worker
from tests.support.run_processes import APRIL, wait_until


def health(base):
    status, body = get(base + "/health")
    return status, orjson.loads(body)


def scrape(base):
    """Metric values at /metrics, by (name, label values in alphabetical order of the labels)."""
    status, body = get(base + "/metrics")
    assert status == 200
    families = list(text_string_to_metric_families(body))
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


# --- a real broker ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_broker_s_figures_and_health_can_be_scraped_while_it_works(start_broker):
    broker = start_broker("--evaluation.prompts", "1")
    wait_until(lambda: health(broker.http)[0] == 200, broker)
    status, body = health(broker.http)
    assert (status, body["status"], body["run"], body["state"]) == (200, "ok", "small", "running")
    assert "no learner is connected" in body["reason"]
    assert get(broker.http + "/secrets")[0] == 404

    learner, worker = Client(broker.address, "learner", "raw-learner"), Worker(broker.address)
    try:
        learner.hello()
        learner.ask("LearnerAdmitted", "StartLearner", 0, "tcp://127.0.0.1:9")
        worker.hello()
        worker.send("WorkerCapacity", [0, 0], 6, 0.0)
        lease = worker.next_training_lease([0, 0])
        worker.generate(lease, 3, [0, 0])

        def shows(name, *labels, value):
            learner.receive(), worker.receive()
            return scrape(broker.http).get((name, *labels)) == value

        wait_until(lambda: shows("april_tokens_accepted_total", "training", value=3), broker)
        wait_until(lambda: shows("april_samples", "leased", "training", value=6), broker)
        found = scrape(broker.http)
        assert found["april_chunks_accepted_total", "training"] == 1 and found["april_tokens", "open"] == 3
        assert found["april_leases", "training"] == 6
        assert found["april_sessions", "worker"] == found["april_sessions", "learner"] == 1
        assert found["april_worker_capacity", "raw-worker"] == found["april_worker_leases", "raw-worker"] == 6
        assert found["april_ledger_closed",] == 1 and found["april_broker_starts",] == 1
        assert found["april_journal_bytes",] > 0 and found["april_journal_sync_seconds_count",] > 0
        assert found["april_staleness_steps", "bound"] == 5
        worker.sockets["data"].send_multipart([b"nonsense"])
        wait_until(lambda: any(key[0] == "april_refusals_total" for key in scrape(broker.http)), broker)
        assert health(broker.http)[1]["reason"] == ""
    finally:
        learner.close()
        worker.close()
    broker.process.terminate()
    broker.wait()
    assert not (broker.run_dir / "http").exists()


@pytest.mark.full
@pytest.mark.full
def test_a_taken_port_is_said_so(start_broker, start, config_file):
    taken = start_broker().http.removeprefix("http://")
    other = ["--run.name", "second", "--operations.http", taken]
    second = start("second", [*APRIL, "broker", str(config_file), *other])
    assert second.wait() == 2
    assert f"key 'operations.http' = '{taken}'" in second.output


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "http://127.0.0.1:9", ":9"])
def test_an_address_that_is_none_is_refused(config_file, address):
    with pytest.raises(configuration.ConfigError, match=r"operations\.http"):
        configuration.load(config_file, ["--operations.http", address])


def test_http_none_serves_nothing(config_file):
    assert configuration.load(config_file, ["--operations.http", "none"]).operations.http_address is None


# --- health in every condition ------------------------------------------------------------------------------

WORKING = {
    "run": "small", "state": "running", "phase": "generating", "step": 3, "over": "", "read_only": "",
    "workers": ["w0", "w1"], "learner_silent_s": 0.2,
}  # fmt: skip
UNKNOWN = RunStatus(**dict.fromkeys(RunStatus.__struct_fields__))


@pytest.fixture(scope="module")
def serving():
    exporter = Exporter("127.0.0.1", 0, stuck_after_s=30.0)
    yield exporter
    exporter.close()


@pytest.fixture
def exporter(serving):
    """An exporter that takes its next metrics snapshot at once."""
    serving._next_snapshot = 0.0
    return serving


def show(exporter, now=None, **changes):
    """Let the broker's loop pass at time `now` in the condition given by `changes`; returns the answer of /health."""
    snapshot = MetricsSnapshot(msgspec.structs.replace(UNKNOWN, **WORKING | changes))
    exporter._next_snapshot = 0.0
    exporter.passed(clock.now() if now is None else now, lambda _: snapshot)
    return health(exporter.address)


def test_before_its_first_pass_a_broker_is_starting():
    exporter = Exporter("127.0.0.1", 0, stuck_after_s=30.0)
    assert health(exporter.address)[0] == 503
    exporter.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"phase": "waiting for weights"}, "the learner has to publish them"),
        ({"phase": "training"}, "the learner has the next batch"),
        ({"phase": "handing out"}, "they have no room"),
        ({"phase": "draining"}, "leases are still coming back"),
        ({"phase": "drained"}, "april drain --end"),
        ({"phase": "drained", "learner_silent_s": None, "workers": []}, "april drain --end"),
        ({"learner_silent_s": None}, "no learner is connected"),
        ({"workers": [], "phase": "waiting for weights"}, "no worker is connected"),
        ({"phase": "finished", "state": "finished", "over": "all steps are done"}, "the run is over"),
    ],
)
def test_a_pause_is_healthy_and_has_a_reason(exporter, changes, reason):
    status, body = show(exporter, **changes)
    assert (status, body["status"]) == (200, "ok")
    assert reason in body["reason"] and bool(reason) == bool(body["reason"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"read_only": "No space left on device"}, "No space left on device"),
        ({"state": "failed", "phase": "finished", "over": "all groups die"}, "all groups die"),
    ],
)
def test_a_broker_that_cannot_go_on_is_not_healthy(exporter, changes, reason):
    status, body = show(exporter, **changes)
    assert (status, body["status"]) == (503, "failing") and reason in body["reason"]


def test_a_stalled_loop_is_reported_by_the_http_thread(exporter, monkeypatch):
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now)
    status, body = show(exporter, now=now - 31.0)
    assert status == 503 and "has not come round for 31 s" in body["reason"]
    assert show(exporter, now=now - 29.0)[0] == 200


# --- figures ------------------------------------------------------------------------------------------------


def test_sync_times_are_a_cumulative_histogram():
    times = Histogram()
    for seconds in (0.0001, 0.0005, 0.003, 99.0):
        times = times.add(seconds)
    *buckets, count, total = histogram_family(times).samples
    assert [bucket.labels["le"] for bucket in buckets] == [*map(str, SYNC_BUCKETS_S), "+Inf"]
    counts = [bucket.value for bucket in buckets]
    assert counts[0] == 2 and counts[-2] == 3 and counts[-1] == count.value == 4 and counts == sorted(counts)
    assert total.value == pytest.approx(99.0036)
