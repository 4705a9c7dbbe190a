"""Manifests and the chart: one is the other with its values filled in, and what they start is a run that trains."""

import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from kubernetes_validate import validate

from april import config as configuration
from april.launch.clusters import LAUNCHERS, command
from april.launch.clusters.helm import CHART
from april.launch.clusters.kubernetes import MANIFEST, Kubernetes
from april.security import keygen
from tests.clusters.pods import cluster
from tests.conftest import SERVERS
from tests.run.processes import assert_closed, steps_recorded

HELM = Path(__file__).parents[2] / SERVERS["helm"]
NEEDED = ("--launch.image", "april:1", "--launch.volume", "runs", "--run.dir", "/runs")
CASES = {
    "small": (),
    "two learner nodes on NVIDIA": (
        "--launch.learner_nodes", "2", "--learner.ranks", "4", "--learner.device", "auto", "--worker.device", "auto",
    ),
    "AMD": ("--launch.accelerator", "amd.com/gpu", "--worker.device", "auto", "--launch.user", "0"),
    "a queue of Kueue's, a monitor and variables": (
        "--launch.labels", "{'kueue.x-k8s.io/queue-name' = 'team-a'}", "--launch.monitor", "true",
        "--launch.environment", "{NCCL_DEBUG = 'INFO', EMPTY = '', QUOTED = 'a \"b\" {{ c }}: d'}",
    ),
    "scorers and more workers elsewhere": (
        "--reward.where", "scorer", "--scorer.count", "2", "--worker.count", "5", "--launch.port", "6000",
        "--launch.namespace", "other",
    ),
}  # fmt: skip


@pytest.fixture
def launcher(config_file, tmp_path):
    """launcher(on, *overrides) -> one that has written nothing yet; keys are in tmp_path"""
    keygen.make_folder(tmp_path / "keys")

    def make(on, *overrides):
        options = ["--security.keys", str(tmp_path / "keys"), "--launch.on", on, *NEEDED, *overrides]
        return command.launcher_of(configuration.load(config_file, options, inputs=()), LAUNCHERS.find(on))

    return make


def by_name(text):
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text) if one}


@pytest.mark.helm
def test_one_chart_with_the_values_of_five_runs_is_their_manifests(launcher, tmp_path):
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
            if kind != "PodMonitor":  # of Prometheus' operator, not of Kubernetes
                validate(objects[kind, name], "1.30", strict=True)
        assert objects == by_name(Kubernetes(helm.layout).files()[MANIFEST]), case


@pytest.mark.slurm
def test_the_containers_of_a_manifest_form_a_run_that_trains_and_outlives_killed_pods(launcher, tmp_path):
    options = (
        "--schedule.max_steps", "100000", "--data.epochs", "1000", "--launch.learner_nodes", "2",
        "--learner.ranks", "2", "--worker.count", "2", "--worker.device", "cpu", "--learner.device", "cpu",
    )  # fmt: skip
    objects = list(yaml.safe_load_all(launcher("kubernetes", *options).files()[MANIFEST]))
    claim = tmp_path / "claim"
    claim.mkdir()
    run_dir = claim / "small"
    secrets, claims = {"april-small-keys": tmp_path / "keys"}, {"runs": claim}
    with TemporaryDirectory(prefix="pods") as state, cluster(objects, Path(state), secrets, claims) as made:
        made.tend_until(lambda: steps_recorded(run_dir) >= 3)
        assert made.is_ready("april-small-broker-0")
        made.kill("april-small-worker-0")
        made.kill("april-small-broker-0")
        reached = steps_recorded(run_dir) + 3
        made.tend_until(lambda: steps_recorded(run_dir) >= reached)
        made.delete("april-small-broker-0")
        made.tend_until(made.is_over)
        restarts = {pod.name: pod.restarts for pod in made.pods if pod.restarts}
    assert restarts.keys() >= {"april-small-worker-0", "april-small-broker-0"}
    found = assert_closed(run_dir)
    assert found["state"] == "stopped" and found["replays"]["different"] == 0 and found["starts"]["broker"] == 2
