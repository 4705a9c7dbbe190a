"""The broker's container on Kubernetes: `python -m april.launch.clusters.in_pod RUN PORT PROGRAM ...`.

Kubernetes starts the pods of a StatefulSet and of a Deployment again whatever they end with, and a run ends. So this
one stays when its program has come to the run's end, says so to probes at PORT, and asks for no pods of RUN any more:
neither of its Deployments nor of itself. Where a run has failed, its learner's Job is suspended, too.

A pod is asked to leave in one way, whether the run is to stop or the pod is only to be moved. Which of them it is,
Kubernetes says: as long as it wants the pod, another one will go on, and the broker steps aside for it.
"""

import http.client
import http.server
import math
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

from april.launch.clusters.manifests import HOLDERS
from april.launch.part import shell_status
from april.processes import clock
from april.processes.lifetime import RUN_FAILED, STEP_ASIDE

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
OVER = (0, RUN_FAILED)
AGAIN_S, LONGEST_S = 10.0, 10.0
"""between two attempts, and of one"""
ASK_S, ASK_AGAIN_S = 60.0, 1.0
"""how long a Kubernetes that does not answer is asked whether it wants this pod, and how often"""
LOOK_S = 0.1
NONE = {"spec": {"replicas": 0}}


class Container:
    """Runs the program, and stays where it has come to the run's end."""

    def __init__(self, run: str, port: int):
        self.run, self.port = run, port
        self.leaving = False

    def hold(self, program: list[str]) -> int:
        """Exit status of the program, where the run is not over."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        status = self._wait(subprocess.Popen(program))
        if status not in OVER:
            return shell_status(status)
        with answering_probes(self.port):
            while problem := want_no_pods(self.run, failed=status == RUN_FAILED):
                print(f"the run is over, and its pods are still wanted: {problem}", file=sys.stderr, flush=True)
                if self._is_to_leave(within_s=AGAIN_S):
                    return 0
            self._is_to_leave(within_s=math.inf)
        return 0

    def _wait(self, child: subprocess.Popen) -> int:
        """Until it ends; once this pod is asked to leave, so is the program."""
        told = False
        while child.poll() is None:
            if self.leaving and not told:
                told = True
                child.send_signal(STEP_ASIDE if is_wanted(self.run) else signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(LOOK_S)
        return child.returncode

    def _on_signal(self, number: int, frame: object) -> None:
        self.leaving = True

    def _is_to_leave(self, within_s: float) -> bool:
        until = clock.now() + within_s
        while not self.leaving and clock.now() < until:
            time.sleep(LOOK_S)
        return self.leaving


def is_wanted(run: str) -> bool:
    """Whether another pod will take this one's place. Where Kubernetes does not say so, the run stops in order."""
    until = clock.now() + ASK_S
    while True:
        try:
            with ask("GET", f"apps/v1/statefulsets/{run}-broker") as answer:
                found = orjson.loads(answer.read())
            return bool(found["spec"]["replicas"]) and "deletionTimestamp" not in found["metadata"]
        except urllib.error.HTTPError as error:
            if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
                return False
        except OSError as error:
            print(f"Kubernetes does not say whether this pod is to come again: {error}", file=sys.stderr, flush=True)
        if clock.now() >= until:
            return False
        time.sleep(ASK_AGAIN_S)


def want_no_pods(run: str, failed: bool) -> str:
    """Ask for it; what went wrong, if anything did. The broker's own pod is the last."""
    wanted: list[tuple[str, dict]] = [(f"apps/v1/deployments/{run}-{role}/scale", NONE) for role in HOLDERS]
    if failed:
        wanted.append((f"batch/v1/jobs/{run}-learner", {"spec": {"suspend": True}}))
    wanted.append((f"apps/v1/statefulsets/{run}-broker/scale", NONE))
    problems = [f"{what}: {problem}" for what, change in wanted if (problem := patch(what, change))]
    return "; ".join(problems)


def patch(what: str, change: dict) -> str:
    """What went wrong, if anything did; what is not there has no pods."""
    try:
        ask("PATCH", what, change).close()
    except urllib.error.HTTPError as error:
        return "" if error.code == http.HTTPStatus.NOT_FOUND else f"{error.code} {error.reason}"
    except OSError as error:
        return str(error)
    return ""


def ask(method: str, what: str, change: dict | None = None) -> http.client.HTTPResponse:
    """Kubernetes' answer about an object, GROUP/VERSION/KIND/NAME. Raises OSError, of which an HTTPError is one."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    group, version, kind, name = what.split("/", 3)
    namespace = (ACCOUNT / "namespace").read_text().strip()
    request = urllib.request.Request(
        f"https://{host}:{port}/apis/{group}/{version}/namespaces/{namespace}/{kind}/{name}",
        None if change is None else orjson.dumps(change),
        {
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}",
            "Content-Type": "application/merge-patch+json",
        },
        method=method,
    )
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    return urllib.request.urlopen(request, timeout=LONGEST_S, context=trust)


class Over(http.server.BaseHTTPRequestHandler):
    """A pod that is well, and has nothing to do."""

    def do_GET(self) -> None:
        self.send_response(http.HTTPStatus.OK)
        self.end_headers()
        self.wfile.write(b"over\n")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def answering_probes(port: int) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("0.0.0.0", port), Over) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


if __name__ == "__main__":
    sys.exit(Container(sys.argv[1], int(sys.argv[2])).hold(sys.argv[3:]))
