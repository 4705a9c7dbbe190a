"""No HTTP server of April's answers a page of another site, nor one whose name was pointed at it (DNS rebinding)."""

import ast
import http.client
import threading
from contextlib import closing
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

import april
from april import config as configuration
from april.broker.server import start_exporter
from april.broker.views.metrics import Exporter
from april.config import ConfigError
from april.launch.clusters.broker_pod import ProbeHandler
from april.wire.security.web_requests import names_of, objection

FOUNDATIONS = ("BaseHTTPRequestHandler", "SimpleHTTPRequestHandler", "Application", "Starlette", "start_server")
"""What HTTP servers are made of."""
HERE, SITE = "127.0.0.1:8642", "http://127.0.0.1:8642"
PAGES = [
    (["evil.example"], []),
    (["evil.example:8642"], ["http://evil.example:8642"]),
    (["localhost.evil.example"], []),
    (["localhost@evil.example"], []),
    (["127.0.0.1.evil.example:8642"], []),
    (["evil"], []),
    ([""], []),
    ([HERE, "evil.example"], []),
    ([HERE, "localhost:8642"], []),
    ([HERE], ["http://evil.example"]),
    ([HERE], ["null"]),
    ([HERE], [""]),
    ([HERE], ["http://127.0.0.1:8000"]),
    ([HERE], ["http://localhost:8642"]),
    ([HERE], [SITE, "http://evil.example"]),
    (["localhost:8642"], ["http://localhost.evil.example:8642"]),
    ([], ["http://evil.example"]),
]
OWN = [
    ([HERE], []),
    ([HERE], [SITE]),
    (["LOCALHOST:8642"], ["http://localhost:8642"]),
    (["localhost."], []),
    (["[::1]:8642"], ["http://[::1]:8642"]),
    (["10.0.0.7"], ["https://10.0.0.7"]),
    (["Agents.Example.org"], ["https://agents.example.org"]),
    ([], []),
]


@pytest.mark.parametrize(("hosts", "origins"), PAGES)
def test_a_page_of_another_site_gets_no_answer(hosts, origins):
    assert objection(hosts, origins, names_of("127.0.0.1", "agents.example.org"))


@pytest.mark.parametrize(("hosts", "origins"), OWN)
def test_requests_under_an_address_or_a_name_of_the_server_are_answered(hosts, origins):
    assert objection(hosts, origins, names_of("127.0.0.1", "agents.example.org")) == ""


def test_a_server_beyond_loopback_is_asked_under_its_machine_s_name(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-7")
    monkeypatch.setattr("socket.getfqdn", lambda: "gpu-7.cluster.example")
    names = names_of("0.0.0.0")
    assert not any(objection([host], [], names) for host in ("gpu-7:9400", "gpu-7.cluster.example"))
    assert objection(["gpu-7.evil.example"], [], names) and objection(["gpu-7"], [], names_of("127.0.0.1"))


def statuses_for_pages(port, method, path):
    """Statuses of the requests in PAGES that a client can send, and of one that a client on this machine sends."""
    found = []
    for hosts, origins in [*PAGES, ([f"127.0.0.1:{port}"], [])]:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.putrequest(method, path, skip_host=True)
            for name, values in (("Host", hosts), ("Origin", origins)):
                for value in values:
                    connection.putheader(name, value)
            connection.endheaders()
            found.append(connection.getresponse().status)
    return found[:-1], found[-1]


def test_metrics_and_probes_are_not_for_pages():
    exporter = Exporter("127.0.0.1", 0, stuck_after_s=30.0)
    probes = ThreadingHTTPServer(("127.0.0.1", 0), ProbeHandler)
    threading.Thread(target=probes.serve_forever, args=(0.01,), daemon=True).start()
    for port, path in ((int(exporter.address.rpartition(":")[2]), "/metrics"), (probes.server_address[1], "/health")):
        refused, answered = statuses_for_pages(port, "GET", path)
        assert set(refused) == {403} and answered == 200
    exporter.close()
    probes.shutdown()
    probes.server_close()


def test_metrics_are_asked_under_further_names_that_the_configuration_gives(config_file):
    names = ["--operations.http_hosts", '["metrics.example"]']
    exporter = start_exporter(configuration.load(config_file, names))
    port = int(exporter.address.rpartition(":")[2])
    for host, status in (("Metrics.example:9464", 200), ("evil.example", 403)):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", "/metrics", headers={"Host": host})
            assert connection.getresponse().status == status
    exporter.close()
    with pytest.raises(ConfigError, match=r"operations\.http_hosts"):
        configuration.load(config_file, ["--operations.http_hosts", '["metrics.example:9464"]'])


def test_every_http_server_makes_the_check():
    folder, servers = Path(april.__file__).parent, {}
    for file in folder.rglob("*.py"):
        text = file.read_text()
        tree = ast.parse(text if any(name in text for name in FOUNDATIONS) else "")
        calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
        bases = (base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases)
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in (*calls, *bases)}
        if names & set(FOUNDATIONS):
            servers[str(file.relative_to(folder))] = "web_requests" in text
    del servers["wire/security/web_requests.py"]
    assert len(servers) >= 3 and [name for name, checks in servers.items() if not checks] == []
