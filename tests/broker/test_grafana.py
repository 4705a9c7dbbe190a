"""The dashboard for Grafana and the alert rules: what they ask for is what a broker exports."""

import re
import runpy
import shutil
import subprocess
import time
import urllib.parse
from pathlib import Path

import orjson
import pytest

from april.broker.views.exporter import Exporter, Picture
from april.broker.views.health import condition
from april.broker.views.metrics import METRICS, Photographer, SyncTimes
from april.processes import clock
from tests.broker.conversation import make_batch
from tests.broker.test_alarms import gap
from tests.broker.test_exporter import get

FOLDER = Path(__file__).parents[2] / "launch" / "grafana"
RULES = FOLDER / "april.rules.yml"
BESIDE = {"april_last_pass_age_seconds", "april_journal_sync_seconds_bucket"}


def expressions():
    board = orjson.loads((FOLDER / "april.json").read_bytes())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def test_dashboard_and_rules_ask_for_metrics_that_there_are():
    assert len(expressions()) > 20
    rules = re.findall(r"expr: (.*)", RULES.read_text())
    asked = {name for text in [*expressions(), *rules] for name in re.findall(r"april_\w+", text)}
    assert asked <= {*METRICS, *BESIDE}


def test_the_dashboard_is_what_its_script_makes():
    made = runpy.run_path(str(FOLDER / "make_dashboard.py"))["make"]()
    assert made == (FOLDER / "april.json").read_text(), "run launch/grafana/make_dashboard.py"


if shutil.which("promtool"):

    @pytest.mark.full
    def test_every_rule_is_raised_by_its_cause_alone():
        done = subprocess.run(
            ["promtool", "test", "rules", "april.rules.test.yml"],
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        tested = (FOLDER / "april.rules.test.yml").read_text()
        alerts = re.findall(r"alert: (\w+)", RULES.read_text())
        assert alerts and all(f'alertname="{alert}"' in tested for alert in alerts)


if shutil.which("prometheus"):

    @pytest.mark.full
    def test_every_panel_has_a_series_on_a_prometheus_that_scrapes_a_broker(talk, worker, learner, tmp_path):
        make_batch(worker)
        learner.fetch(0)
        learner.consume(0, **gap("w0", 0.01))
        worker.hold(1)
        exporter, photographer, syncs = Exporter("127.0.0.1", 0, stuck_after_s=30.0), Photographer(), SyncTimes()
        target, port = exporter.address.removeprefix("http://"), free_port()
        (tmp_path / "prometheus.yml").write_text(
            f"global: {{scrape_interval: 1s}}\nrule_files: [{RULES}]\n"
            f"scrape_configs: [{{job_name: april, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        listens, home = f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"
        with (tmp_path / "prometheus.log").open("wb") as log:
            server = subprocess.Popen(
                ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", listens, home], stdout=log, stderr=log
            )
        try:
            wanted, deadline = set(expressions()), time.monotonic() + 60
            while wanted and time.monotonic() < deadline:
                talk.tick(1.0)
                syncs.observe(0.002)
                books = talk.service.books
                picture = Picture(condition(books, talk.now), photographer.read(books, 0, talk.now), syncs.picture())
                exporter.passed(clock.now(), lambda picture=picture: picture)
                time.sleep(1.1)
                wanted = {one for one in wanted if not series(port, one.replace("$broker", ".*"))}
            assert not wanted, (tmp_path / "prometheus.log").read_text()[-2000:]
        finally:
            server.kill()
            server.wait()
            exporter.close()


def series(port, expression):
    try:
        _, body = get(f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    except OSError:
        return []
    return orjson.loads(body)["data"]["result"]


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
