"""Manifests and the chart: one is the other with its values filled in. What they start trains, and has an end."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from kubernetes_validate import validate

from april import config as configuration
from april.cli.launch import launcher_of
from april.launch.clusters import LAUNCHERS, broker_pod
from april.launch.clusters.kubernetes import CHART, MANIFEST, Kubernetes
from april.util.lifetime import RUN_FAILED
from april.wire.security import keygen
from tests.launch.clusters import kube_api
from tests.launch.clusters.pods import cluster
from tests.support.certificates import make_certificate
from tests.support.marks import SERVERS
from tests.support.run_processes import APRIL, assert_closed, steps_recorded

HELM = Path(__file__).parents[3] / SERVERS["helm"]
NEEDED = ("--launch.image", "april:1", "--launch.volume", "runs", "--run.dir", "/runs")
CASES = {
    "small": (),
    "two learner nodes on NVIDIA": (
        "--launch.learner_nodes", "2", "--learner.ranks", "4", "--learner.device", "auto", "--worker.device", "auto",
    ),
    "AMD": ("--launch.accelerator", "amd.com/gpu", "--worker.device", "auto", "--launch.user", "0"),
    "a queue of Kueue's with a priority, monitoring and variables": (
        "--launch.labels", "{'kueue.x-k8s.io/queue-name' = 'team-a', 'kueue.x-k8s.io/priority-class' = 'soon'}",
        "--launch.annotations", "{'kueue.x-k8s.io/podset-preferred-topology' = 'cloud.example.com/rack'}",
        "--launch.priority_class", "high", "--launch.monitor", "true",
        "--launch.environment", "{NCCL_DEBUG = 'INFO', EMPTY = '', QUOTED = 'a \"b\" {{ c }}: d'}",
    ),
    "a journal on a volume of the broker's own": ("--launch.journal_gb", "100"),
    "the same of a class": ("--launch.journal_gb", "1000", "--launch.journal_class", "fast"),
    "scorers and more workers elsewhere": (
        "--reward.where", "scorer", "--scorer.count", "2", "--worker.count", "5", "--launch.port", "6000",
        "--launch.namespace", "other",
    ),
}  # fmt: skip


@pytest.fixture
def launcher(config_file, tmp_path):
    """launcher(on, *overrides): a launcher that has written nothing yet; keys are in tmp_path."""
    keygen.make_folder(tmp_path / "keys")

    def make(on, *overrides):
        options = ["--security.keys", str(tmp_path / "keys"), "--launch.on", on, *NEEDED, *overrides]
        return launcher_of(configuration.load(config_file, options, inputs=()), LAUNCHERS.find(on))

    return make


def by_name(text):
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text) if one}


@pytest.mark.helm
def test_the_chart_with_a_run_s_values_renders_its_manifests(launcher, tmp_path):
    for name, text in launcher("helm").files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    values = tmp_path / "values.yaml"
    for case, overrides in CASES.items():
        helm = launcher("helm", *overrides)
        namespace = helm.layout.config.launch.namespace
        values.write_text(helm.files()[f"{CHART}/values.yaml"])
        rendered = subprocess.run(
            [HELM, "template", helm.prefix, tmp_path / CHART, "--namespace", namespace, "--values", values],
            capture_output=True, text=True,
        )  # fmt: skip
        assert rendered.returncode == 0, rendered.stderr
        objects = by_name(rendered.stdout)
        for kind, name in objects:
            if kind not in ("PodMonitor", "PrometheusRule"):  # of Prometheus' operator, not of Kubernetes
                validate(objects[kind, name], "1.30", strict=True)
        assert objects == by_name(Kubernetes(helm.layout).files()[MANIFEST]), case


def test_every_workload_and_its_pods_have_the_configured_labels(launcher):
    labels = {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/priority-class": "soon"}
    overrides = CASES["a queue of Kueue's with a priority, monitoring and variables"]
    objects = by_name(launcher("kubernetes", *overrides).files()[MANIFEST])
    workloads = [one for one in objects.values() if "template" in one.get("spec", {})]
    assert {one["kind"] for one in workloads} == {"StatefulSet", "Job", "Deployment"}
    for one in workloads:
        pods = one["spec"]["template"]
        assert (
            labels.items() <= one["metadata"]["labels"].items() and labels.items() <= pods["metadata"]["labels"].items()
        )
        assert pods["spec"]["priorityClassName"] == "high"
        assert pods["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-preferred-topology": "cloud.example.com/rack"}
    alerts = objects["PrometheusRule", "april-small-broker"]["spec"]["groups"][0]["rules"]
    board = objects["ConfigMap", "april-small-dashboard"]
    assert len(alerts) > 5 and board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert len(json.loads(board["data"]["april.json"])["panels"]) > 20


@pytest.mark.helm
@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_a_launched_run_trains_in_pods_survives_killed_and_evicted_ones_and_leaves_none_when_stopped(
    config_file, tmp_path
):
    keygen.make_folder(tmp_path / "keys")
    claim = tmp_path / "claim"
    claim.mkdir()
    run_dir = claim / "small"
    options = {
        "security.keys": tmp_path / "keys", "launch.image": "april:1", "launch.volume": "runs", "run.dir": claim,
        "schedule.max_steps": 100_000, "data.epochs": 1000, "launch.learner_nodes": 2, "learner.ranks": 2,
        "worker.count": 1, "worker.device": "cpu", "learner.device": "cpu", "launch.journal_gb": 1,
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    secrets, claims = {"april-small-keys": tmp_path / "keys"}, {"runs": claim}
    with TemporaryDirectory(prefix="pods") as state, cluster(Path(state), secrets, claims) as made:

        def launch(*words):
            return made.ask(*APRIL, "launch", *words)

        def train_on(steps):
            reached = steps_recorded(run_dir) + steps
            made.tend_until(lambda: steps_recorded(run_dir) >= reached, timeout_s=300)

        launch(str(config_file), "--on", "kubernetes", *words)
        train_on(3)
        assert made.is_ready("april-small-broker-0")
        launch("scale", str(run_dir), "workers=2")
        made.tend_until(lambda: len(made.of("worker")) == 2)
        told = launch("status", str(run_dir))
        assert all(pod.name in told for pod in made.pods) and "statefulset.apps/april-small-broker" in told
        killed = [*made.of("worker")[:1], *made.of("broker")]
        for pod in killed:
            made.kill(pod)
        made.tend_until(lambda: all(pod.restarts for pod in killed))
        train_on(3)
        evicted = made.pod("april-small-broker-0")
        made.evict(evicted)
        made.tend_until(lambda: evicted not in made.pods and made.of("broker"))
        train_on(3)
        assert "[pod/april-small-broker-0/broker]" in launch("logs", str(run_dir), "broker")
        launch("stop", str(run_dir))
        made.tend_until(lambda: not made.pods, timeout_s=300)
        wanted = {
            one["metadata"]["name"]: one["spec"]["replicas"]
            for one in made.objects
            if "replicas" in one.get("spec", {})
        }
        assert any((Path(state) / "claim-april-small-broker-0" / "small").glob("*.msgpack"))
    assert wanted == {"april-small-broker": 0, "april-small-worker": 0}, "Kubernetes would start them again"
    assert list(made.succeeded.values()) == [2], "both of the learner's pods came to their end"
    found = assert_closed(run_dir)
    assert found["state"] == "stopped" and found["replays"]["different"] == 0 and found["starts"]["broker"] == 3


@pytest.fixture
def api(tmp_path, monkeypatch):
    """A fake of Kubernetes' API in this process with the objects of a run, as its broker's pod sees it. What the pod
    does with signals is undone."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    store = kube_api.Store(tmp_path)
    server = kube_api.serve(store, "127.0.0.1", 0, *make_certificate(tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    account = {"token": "april-small-broker", "namespace": "default", "ca.crt": (tmp_path / "april.pem").read_text()}
    for name, text in account.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(broker_pod, "ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_address[1]))
    yield store
    server.shutdown()
    server.server_close()
    for number, handler in signals.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("status", "suspended"), [(0, False), (RUN_FAILED, True)])
def test_the_broker_s_pod_scales_the_run_to_zero_at_its_end_and_may_do_nothing_else(api, launcher, status, suspended):
    plurals = {
        kind: (api_version, plural) for api_version, kinds in kube_api.KINDS.items() for plural, kind in kinds.items()
    }
    for one in by_name(launcher("kubernetes").files()[MANIFEST]).values():
        api.create(plurals[one["kind"]][1], "default", one)
    broker = api.get("statefulsets", "default", "april-small-broker")
    worker = api.get("deployments", "default", "april-small-worker")
    learner = api.get("jobs", "default", "april-small-learner")
    assert broker_pod.patch("apps/v1/deployments/april-small-worker", {}) == "403 Forbidden"

    def as_kubernetes():
        if broker["spec"]["replicas"] == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    api.on_change = as_kubernetes
    assert (
        broker_pod.BrokerContainer("april-small", 0).run_program([sys.executable, "-c", f"raise SystemExit({status})"])
        == 0
    )
    assert worker["spec"]["replicas"] == broker["spec"]["replicas"] == 0
    assert learner["spec"]["suspend"] is suspended


def test_a_dead_broker_is_left_to_kubernetes_to_restart(api):
    assert broker_pod.BrokerContainer("april-small", 0).run_program([sys.executable, "-c", "raise SystemExit(1)"]) == 1


@pytest.mark.parametrize(
    ("replicas", "told"), [(1, signal.SIGUSR1), (0, signal.SIGTERM), (None, signal.SIGTERM)],
    ids=["wanted", "not wanted", "gone"],
)  # fmt: skip
def test_a_stopped_pod_stops_the_run_unless_another_pod_will_replace_it(api, launcher, replicas, told):
    objects = by_name(launcher("kubernetes").files()[MANIFEST])
    for kind, plural in (("Role", "roles"), ("RoleBinding", "rolebindings"), ("StatefulSet", "statefulsets")):
        one = objects[kind, "april-small-broker"]
        if kind != "StatefulSet" or replicas is not None:
            api.create(plural, "default", one)
    objects["StatefulSet", "april-small-broker"]["spec"]["replicas"] = replicas
    container = broker_pod.BrokerContainer("april-small", 0)
    container.stopping = True
    assert container.run_program(["sleep", "600"]) == 128 + told
