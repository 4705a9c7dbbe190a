"""Grafana's dashboard and Prometheus's alert rules use only metrics that a broker exports."""

import re
import runpy
import subprocess
import urllib.parse
from pathlib import Path

import orjson
import pytest

from april.broker.views.metrics import METRICS
from tests.support.http_get import get
from tests.support.run_processes import wait_until

ROOT = Path(__file__).parents[2]
FOLDER, PROMETHEUS = ROOT / "launch" / "grafana", ROOT / ".venv-prometheus/usr/bin"
SHIPPED = ROOT / "april" / "launch" / "monitoring"
RULES = SHIPPED / "april.rules.yml"
LISTENS = re.compile(r'msg="Listening on" address=(\S+)')
BESIDE = {"april_last_pass_age_seconds", "april_journal_sync_seconds_bucket"}


def expressions():
    board = orjson.loads((SHIPPED / "april.json").read_bytes())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def test_dashboard_and_rules_ask_for_metrics_that_there_are():
    assert len(expressions()) > 20
    rules = re.findall(r"expr: (.*)", RULES.read_text())
    asked = {name for text in [*expressions(), *rules] for name in re.findall(r"april_\w+", text)}
    assert asked <= {*METRICS, *BESIDE}


def test_the_dashboard_is_what_its_script_makes():
    made = runpy.run_path(str(FOLDER / "make_dashboard.py"))["make"]()
    assert made == (SHIPPED / "april.json").read_text(), "run launch/grafana/make_dashboard.py"


@pytest.mark.prometheus
def test_every_rule_is_raised_by_its_cause_alone():
    command = [PROMETHEUS / "promtool", "test", "rules", "april.rules.test.yml"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = (FOLDER / "april.rules.test.yml").read_text()
    alerts = re.findall(r"alert: (\w+)", RULES.read_text())
    assert alerts and all(f'alertname="{alert}"' in tested for alert in alerts)


@pytest.mark.prometheus
def test_every_panel_has_a_series_on_a_prometheus_that_scrapes_a_run(start_run, start, run_dir, tmp_path):
    run = start_run("--operations.http", "127.0.0.1:0", "--schedule.max_steps", "100000")
    wait_until((run_dir / "http").exists, run)
    scraped = (run_dir / "http").read_text().removeprefix("http://")
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s}}\nrule_files: [{RULES}]\n"
        f"scrape_configs: [{{job_name: april, static_configs: [{{targets: ['{scraped}']}}]}}]\n"
    )
    listens, home = "--web.listen-address=127.0.0.1:0", f"--storage.tsdb.path={tmp_path / 'tsdb'}"
    command = [str(PROMETHEUS / "prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}", listens, home]
    prometheus = start("prometheus", command)
    wait_until(lambda: "Server is ready to receive web requests" in prometheus.output, prometheus)
    wait_until(lambda: LISTENS.search(prometheus.output), prometheus)
    places = LISTENS.findall(prometheus.output)
    wanted = set(expressions())

    def all_seen():
        wanted.difference_update([one for one in wanted if series(places[0], one.replace("$broker", ".*"))])
        assert prometheus.process.poll() is None, prometheus.output
        return not wanted

    wait_until(all_seen, run)


def series(place, expression):
    _, body = get(f"http://{place}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    return orjson.loads(body)["data"]["result"]
