"""A Kubernetes of the least kind: the fake of its API, and what runs the pods of its objects on network namespaces.

It knows nothing but the objects. Each pod has a host of its own, a root of its own in which volumes are mounted, and
the environment that its container asks for. A pod that ends is started again in its place as its `restartPolicy` says;
there are as many as the objects want, and what is not wanted any more is asked to leave.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.launch.clusters.kube_api import kubeconfig
from tests.support.certificates import make_certificate
from tests.support.hosts.hosts import Hosts, end, hosts, run
from tests.support.run_processes import PATIENCE_S

IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "OMP_NUM_THREADS": "1",
}
"""the environment that this machine, as an image, brings"""
AS_A_CONTAINER = """
hostname "$1"; root=$2; shift 2
mount -t tmpfs tmpfs "$root"
for entry in /*; do
    if [ -L "$entry" ]; then cp -a "$entry" "$root/"
    elif [ "$entry" = /run ]; then mkdir "$root$entry"; mount -t tmpfs tmpfs "$root$entry"
    elif [ -d "$entry" ]; then mkdir "$root$entry"; mount --rbind "$entry" "$root$entry"
    fi
done
while [ "$1" != -- ]; do mkdir -p "$root$2"; mount --bind "$1" "$root$2"; shift 2; done
shift
exec chroot "$root" "$@"
"""
KUBECTL = Path(__file__).parents[3] / ".venv-helm/kubectl"
HOSTS = 8
"""the first has the API, the others a pod each"""
PORT = 6443
ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"
"""which /var/run leads to"""
PROBE = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=60)"


@dataclass
class Pod:
    name: str
    owner: str
    """Uid of its object."""
    labels: dict[str, str]
    host: int
    spec: dict
    variables: dict[str, str]
    process: subprocess.Popen | None = None
    restarts: int = 0
    unwanted: bool = False
    asked: bool = False
    """Whether it was asked to stop."""

    @property
    def container(self) -> dict:
        (container,) = self.spec["containers"]
        return container

    @property
    def as_object(self) -> dict:
        metadata = {"name": self.name, "namespace": "default", "labels": self.labels, "uid": self.name}
        return {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": self.spec, "status": {}}

    @property
    def is_done(self) -> bool:
        """Whether it belongs to a Job that has completed."""
        ended = self.process is not None and self.process.poll() == 0
        return ended and self.spec.get("restartPolicy") == "OnFailure"


class Cluster:
    """`secrets` and `claims`: folders by the names of Secrets and of claims of volumes.

    with cluster(folder, secrets, claims) as made:
        made.ask("kubectl", "apply", "--filename", "run.yaml")
        made.tend_until(lambda: trained())
        made.kill("april-small-broker-0")
    """

    def __init__(self, folder: Path, secrets: dict[str, Path], claims: dict[str, Path], made: Hosts):
        self.folder, self.secrets, self.claims, self.made = folder, secrets, claims, made
        self.pods: list[Pod] = []
        self.numbers = count()
        self.succeeded: dict[str, int] = {}
        """Completed pods of Jobs, by the Job's uid."""
        address = made.address(0)
        self.certificate, key = make_certificate(folder, address)
        self.environment = os.environ | {
            "PATH": f"{KUBECTL.parent}:{os.environ['PATH']}",
            "KUBECONFIG": str(kubeconfig(folder / "kubeconfig", address, PORT, self.certificate)), "HOME": str(folder),
        }  # fmt: skip
        words = ["-m", "tests.launch.clusters.kube_api", folder, address, PORT, self.certificate, key]
        self.api = subprocess.Popen(
            made.command(0, sys.executable, *map(str, words)),
            cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.api.stdout is not None and self.api.stdout.readline() == "ready\n"

    def ask(self, *command: str) -> str:
        """Output of a command on the API's host, which must succeed."""
        told = subprocess.run(self.made.command(0, *command), env=self.environment, capture_output=True, text=True)
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    @property
    def objects(self) -> list[dict]:
        return json.loads((self.folder / "objects.json").read_text())

    def tend(self) -> None:
        """Once: as many pods as are wanted, each at work."""
        objects = self.objects
        for one in objects:
            if one["kind"] in ("StatefulSet", "Deployment", "Job"):
                self._have(one, objects)
        known = {one["metadata"]["uid"] for one in objects}
        for pod in list(self.pods):
            pod.unwanted |= pod.owner not in known
            self._look_at(pod)
        pods = [pod.as_object for pod in self.pods]
        draft = self.folder / "pods.draft"
        draft.write_text(json.dumps({"pods": pods, "succeeded": self.succeeded}))
        draft.replace(self.folder / "pods.json")

    def _have(self, one: dict, objects: list[dict]) -> None:
        name, uid, spec = one["metadata"]["name"], one["metadata"]["uid"], one["spec"]
        staying = [pod for pod in self.pods if pod.owner == uid and not pod.unwanted]
        if one["kind"] != "Job":
            for pod in staying[spec["replicas"] :]:
                pod.unwanted = True
            taken = {pod.name for pod in self.pods}
            while len(staying) < spec["replicas"]:
                suffix = str(next(self.numbers)) if one["kind"] == "Deployment" else str(len(staying))
                if f"{name}-{suffix}" in taken:
                    return  # a StatefulSet never has two of one name
                staying.append(self._add(one, suffix, {}, objects))
        elif spec["suspend"]:
            for pod in staying:
                pod.unwanted = True
        elif not staying and self.succeeded.get(uid, 0) < spec["completions"]:
            for index in range(spec["parallelism"]):
                self._add(one, str(index), {"JOB_COMPLETION_INDEX": str(index)}, objects)

    def _add(self, owner: dict, suffix: str, variables: dict[str, str], objects: list[dict]) -> Pod:
        template, name = owner["spec"]["template"], f"{owner['metadata']['name']}-{suffix}"
        (container,) = template["spec"]["containers"]
        for source in container.get("envFrom", []):
            variables = variables | self._map(source["configMapRef"]["name"])
        for entry in container["env"]:
            if "valueFrom" in entry:
                assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
            variables = variables | {entry["name"]: entry.get("value", name)}
        host = min(set(range(1, HOSTS)) - {pod.host for pod in self.pods})
        labels = template["metadata"]["labels"]
        pod = Pod(name, owner["metadata"]["uid"], labels, host, template["spec"], variables)
        self.pods.append(pod)
        self._write_names([one for one in objects if one["kind"] == "Service"])
        self._start(pod)
        return pod

    def _map(self, name: str) -> dict[str, str]:
        return next(
            one["data"] for one in self.objects if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", name)
        )

    def _look_at(self, pod: Pod) -> None:
        assert pod.process is not None
        if pod.process.poll() is None:
            if pod.unwanted and not pod.asked:
                pod.asked = True
                pod.process.terminate()
            return
        if pod.unwanted:
            self.pods.remove(pod)
        elif pod.is_done:
            self.pods.remove(pod)
            self.succeeded[pod.owner] = self.succeeded.get(pod.owner, 0) + 1
        else:
            pod.restarts += 1
            self._start(pod)

    def pod(self, name: str) -> Pod:
        return next(pod for pod in self.pods if pod.name == name)

    def of(self, part: str) -> list[Pod]:
        """Pods that are to stay."""
        return [pod for pod in self.pods if pod.labels["april/part"] == part and not pod.unwanted]

    def _write_names(self, services: list[dict]) -> None:
        """Names that pods can resolve: their own, and those of headless Services."""
        lines = ["127.0.0.1 localhost"]
        for pod in self.pods:
            lines.append(f"{self.made.address(pod.host)} {pod.name}")
            for service in services:
                name, selector = service["metadata"]["name"], service["spec"]["selector"]
                assert service["spec"]["clusterIP"] == "None"
                if selector.items() <= pod.labels.items():
                    lines.append(f"{self.made.address(pod.host)} {name}")
        (self.folder / "hosts").write_text("".join(f"{line}\n" for line in lines))

    def _start(self, pod: Pod) -> None:
        root = self.folder / "root"
        root.mkdir(exist_ok=True)
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        mounts = [
            word
            for mount in pod.container["volumeMounts"]
            for word in (str(self._mounted(pod, volumes.get(mount["name"]))), mount["mountPath"])
        ]
        if account := self._account(pod):
            mounts += [str(account), ACCOUNT]
        api = {"KUBERNETES_SERVICE_HOST": self.made.address(0), "KUBERNETES_SERVICE_PORT": str(PORT)}
        words = [self._expanded(word, pod.variables) for word in pod.container["command"]]
        inside = ["bash", "-euc", AS_A_CONTAINER, "--", pod.name, str(root), *mounts, "--", *words]
        named = {name: value for name, value in os.environ.items() if name.startswith("OPENBLAS")}
        with (self.folder / f"{pod.name}.log").open("ab") as log:
            pod.process = subprocess.Popen(
                self.made.command(pod.host, *inside), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=named | IMAGE | api | pod.variables, start_new_session=True,
            )  # fmt: skip

    def _account(self, pod: Pod) -> Path | None:
        """By which it may ask the API, if it may; the fake takes an account's name for its token."""
        if not pod.spec.get("automountServiceAccountToken", True):
            return None
        folder = self.folder / f"{pod.name}-account"
        folder.mkdir(exist_ok=True)
        (folder / "token").write_text(pod.spec["serviceAccountName"])
        (folder / "namespace").write_text("default")
        (folder / "ca.crt").write_bytes(self.certificate.read_bytes())
        return folder

    def _mounted(self, pod: Pod, volume: dict | None) -> Path:
        """`volume`: none where a StatefulSet's claim template gives one to each pod of that name, the next one too."""
        if volume is not None:
            return self._content(pod, volume)
        folder = self.folder / f"claim-{pod.name}"
        folder.mkdir(exist_ok=True)
        return folder

    def _content(self, pod: Pod, volume: dict) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            return self.claims[claim["claimName"]]
        folder = self.folder / f"{pod.name}-{volume['name']}"
        folder.mkdir(exist_ok=True)
        files: dict[str, bytes] = {}
        mode = 0o644
        if "configMap" in volume:
            files = {name: text.encode() for name, text in self._map(volume["configMap"]["name"]).items()}
        elif "secret" in volume:
            secret = volume["secret"]
            files = {path.name: path.read_bytes() for path in self.secrets[secret["secretName"]].iterdir()}
            mode = secret["defaultMode"]
        else:
            assert "emptyDir" in volume
        for name, content in files.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(mode)
        return folder

    @staticmethod
    def _expanded(word: str, variables: dict[str, str]) -> str:
        return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)

    def tend_until(self, condition, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"it never came to that\n{self.said()}"
            self.tend()
            time.sleep(0.05)

    def kill(self, pod: Pod) -> None:
        """Every process of the pod at once, as when the kernel or the node ends it."""
        for process in run("ip", "netns", "pids", self.made.names[pod.host]).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def evict(self, pod: Pod) -> None:
        """Ask it to leave though it is wanted, as when its node is drained: another takes its place."""
        pod.unwanted = True

    def is_ready(self, name: str) -> bool:
        """Result of its readiness probe, sent from another host."""
        pod = self.pod(name)
        probe = pod.container["readinessProbe"]["httpGet"]
        url = f"http://{self.made.address(pod.host)}:{probe['port']}{probe['path']}"
        return subprocess.run(self.made.command(0, sys.executable, "-c", PROBE, url)).returncode == 0

    def said(self) -> str:
        return "\n".join(f"==> {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))


@contextmanager
def cluster(folder: Path, secrets: dict[str, Path], claims: dict[str, Path]):
    with hosts(HOSTS, folder) as made:
        it = Cluster(folder, secrets, claims, made)
        try:
            yield it
        finally:
            for process in [it.api, *(pod.process for pod in it.pods)]:
                if process is not None:
                    end(process)
