"""Runs the Jobs of a manifest on hosts made of network namespaces: a kubelet of the least kind.

It knows nothing but the objects. Each pod has a host of its own, a root of its own in which volumes are mounted, and
the environment that its container asks for. What ends with another status than 0 is started again in its place.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.clusters.hosts import Hosts, end, hosts, run
from tests.run.processes import PATIENCE_S

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
    elif [ -d "$entry" ]; then mkdir "$root$entry"; mount --rbind "$entry" "$root$entry"
    fi
done
while [ "$1" != -- ]; do mkdir -p "$root$2"; mount --bind "$1" "$root$2"; shift 2; done
shift
exec chroot "$root" "$@"
"""
PROBE = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"


@dataclass
class Pod:
    name: str
    part: str
    host: int
    spec: dict
    variables: dict[str, str]
    process: subprocess.Popen | None = None
    restarts: int = 0

    @property
    def container(self) -> dict:
        (container,) = self.spec["containers"]
        return container


class Cluster:
    """`secrets` and `claims`: folders by the names of Secrets and of claims of volumes.

    with cluster(objects, folder, secrets, claims) as made:
        made.tend_until(lambda: trained())
        made.kill("april-small-worker-0")
    """

    def __init__(self, objects: list[dict], folder: Path, secrets: dict[str, Path], claims: dict[str, Path]):
        self.folder, self.secrets, self.claims = folder, secrets, claims
        self.maps = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
        self.services = [one for one in objects if one["kind"] == "Service"]
        self.pods: list[Pod] = []
        for job in (one for one in objects if one["kind"] == "Job"):
            for index in range(job["spec"]["parallelism"]):
                self._add(job, index)
        self.made = Hosts(0, folder)

    def _add(self, job: dict, index: int) -> None:
        template, name = job["spec"]["template"], f"{job['metadata']['name']}-{index}"
        indexed = {"JOB_COMPLETION_INDEX": str(index)} if job["spec"].get("completionMode") == "Indexed" else {}
        (container,) = template["spec"]["containers"]
        variables = dict(indexed)
        for source in container.get("envFrom", []):
            variables |= self.maps[source["configMapRef"]["name"]]
        for entry in container["env"]:
            if "valueFrom" in entry:
                assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
            variables[entry["name"]] = entry.get("value", name)
        part = template["metadata"]["labels"]["april/part"]
        self.pods.append(Pod(name, part, len(self.pods), template["spec"], variables))

    def pod(self, name: str) -> Pod:
        return next(pod for pod in self.pods if pod.name == name)

    def start(self, made: Hosts) -> None:
        self.made = made
        (self.folder / "hosts").write_text("".join(f"{line}\n" for line in self._names()))
        for pod in self.pods:
            self._start(pod)

    def _names(self) -> list[str]:
        """What pods find by name: themselves, and each other as the Services without an address say."""
        lines = ["127.0.0.1 localhost"]
        for pod in self.pods:
            lines.append(f"{self.made.address(pod.host)} {pod.name}")
            for service in self.services:
                name, selector = service["metadata"]["name"], service["spec"]["selector"]
                assert service["spec"]["clusterIP"] == "None"
                if selector["april/part"] == pod.part:
                    lines.append(f"{self.made.address(pod.host)} {name}")
        return lines

    def _start(self, pod: Pod) -> None:
        root = self.folder / "root"
        root.mkdir(exist_ok=True)
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        mounts = [
            word
            for mount in pod.container["volumeMounts"]
            for word in (str(self._content(pod, volumes[mount["name"]])), mount["mountPath"])
        ]
        words = [self._expanded(word, pod.variables) for word in pod.container["command"]]
        inside = ["bash", "-euc", AS_A_CONTAINER, "--", pod.name, str(root), *mounts, "--", *words]
        named = {name: value for name, value in os.environ.items() if name.startswith("OPENBLAS")}
        with (self.folder / f"{pod.name}.log").open("ab") as log:
            pod.process = subprocess.Popen(
                self.made.command(pod.host, *inside), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=named | IMAGE | pod.variables, start_new_session=True,
            )  # fmt: skip

    def _content(self, pod: Pod, volume: dict) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            return self.claims[claim["claimName"]]
        folder = self.folder / f"{pod.name}-{volume['name']}"
        folder.mkdir(exist_ok=True)
        files: dict[str, bytes] = {}
        mode = 0o644
        if "configMap" in volume:
            files = {name: text.encode() for name, text in self.maps[volume["configMap"]["name"]].items()}
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
            for pod in self.pods:
                if pod.process is not None and pod.process.poll():
                    assert pod.spec["restartPolicy"] == "OnFailure"
                    pod.restarts += 1
                    self._start(pod)
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        """Every process of the pod at once, as when the kernel or the node ends it."""
        for process in run("ip", "netns", "pids", self.made.names[self.pod(name).host]).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def is_ready(self, name: str) -> bool:
        """What its readiness probe says, asked from another host."""
        pod = self.pod(name)
        probe = pod.container["readinessProbe"]["httpGet"]
        url = f"http://{self.made.address(pod.host)}:{probe['port']}{probe['path']}"
        elsewhere = (pod.host + 1) % len(self.pods)
        return subprocess.run(self.made.command(elsewhere, sys.executable, "-c", PROBE, url)).returncode == 0

    def delete(self, name: str) -> None:
        """Its container is asked to leave."""
        process = self.pod(name).process
        assert process is not None
        process.terminate()

    def is_over(self) -> bool:
        return all(pod.process is not None and pod.process.poll() == 0 for pod in self.pods)

    def said(self) -> str:
        return "\n".join(f"==> {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))


@contextmanager
def cluster(objects: list[dict], folder: Path, secrets: dict[str, Path], claims: dict[str, Path]):
    it = Cluster(objects, folder, secrets, claims)
    with hosts(len(it.pods), folder) as made:
        try:
            it.start(made)
            yield it
        finally:
            for pod in it.pods:
                if pod.process is not None:
                    end(pod.process)
