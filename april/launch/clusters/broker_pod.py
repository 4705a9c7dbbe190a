"""The broker's container on Kubernetes: `python -m april.launch.clusters.broker_pod RUN PORT PROGRAM ...`.

Kubernetes restarts the pods of StatefulSets and Deployments whatever their exit status, but a run ends. So at the end
of the run this container stays alive, answers probes at PORT, and scales RUN's Deployments and its own StatefulSet to
zero. If the run has failed, it also suspends the learner's Job.

A pod gets the same SIGTERM whether the run is to stop or only the pod is to move. The StatefulSet's replica count tells
them apart: if it still wants the pod, another one will replace it, and the broker steps aside instead of stopping the
run.
"""

import http.client
import http.server
import math
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

from april.launch.clusters.manifests import HOLDERS
from april.launch.part import shell_status
from april.util import clock
from april.util.lifetime import RUN_FAILED, STEP_ASIDE, PartThread
from april.wire.security.web_requests import CheckedRequestHandler

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RUN_OVER = (0, RUN_FAILED)
RETRY_S, REQUEST_TIMEOUT_S = 10.0, 10.0
"""Interval between two attempts to scale down, and timeout of one request to Kubernetes (seconds)."""
ASK_S, ASK_INTERVAL_S = 60.0, 1.0
"""Total time and interval of attempts to learn whether this pod is still wanted."""
POLL_S = 0.1
ZERO_REPLICAS = {"spec": {"replicas": 0}}


class BrokerContainer:
    """Runs the broker, and stays alive at the end of the run until its pod is removed."""

    def __init__(self, run: str, port: int):
        self.run, self.port = run, port
        self.stopping = False

    def run_program(self, program: list[str]) -> int:
        """Run the program; returns its exit status at once if the run is not over, else 0 when the pod is stopped."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        status = self._wait(subprocess.Popen(program))
        if status not in RUN_OVER:
            return shell_status(status)
        with answering_probes(self.port):
            while problem := scale_to_zero(self.run, failed=status == RUN_FAILED):
                print(
                    f"the run is over, but its pods could not be scaled to zero: {problem}", file=sys.stderr, flush=True
                )
                if self._wait_for_stop(within_s=RETRY_S):
                    return 0
            self._wait_for_stop(within_s=math.inf)
        return 0

    def _wait(self, child: subprocess.Popen) -> int:
        """Wait for the program's end; returns its exit status. If the pod gets SIGTERM meanwhile, tell the program to
        step aside if the StatefulSet still wants the pod, or else to stop."""
        signalled = False
        while child.poll() is None:
            if self.stopping and not signalled:
                signalled = True
                child.send_signal(STEP_ASIDE if is_wanted(self.run) else signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(POLL_S)
        return child.returncode

    def _on_signal(self, number: int, frame: object) -> None:
        self.stopping = True

    def _wait_for_stop(self, within_s: float) -> bool:
        until = clock.now() + within_s
        while not self.stopping and clock.now() < until:
            time.sleep(POLL_S)
        return self.stopping


def is_wanted(run: str) -> bool:
    """Whether the StatefulSet still wants this pod, so that another one will replace it. False if Kubernetes does not
    answer: the run then stops in order."""
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
        time.sleep(ASK_INTERVAL_S)


def scale_to_zero(run: str, failed: bool) -> str:
    """Scale the run's pods to zero, the broker's own last; returns an error text, empty on success. `failed`: the run
    has failed, so that the learner's Job is suspended too."""
    wanted: list[tuple[str, dict]] = [(f"apps/v1/deployments/{run}-{role}/scale", ZERO_REPLICAS) for role in HOLDERS]
    if failed:
        wanted.append((f"batch/v1/jobs/{run}-learner", {"spec": {"suspend": True}}))
    wanted.append((f"apps/v1/statefulsets/{run}-broker/scale", ZERO_REPLICAS))
    problems = [f"{path}: {problem}" for path, change in wanted if (problem := patch(path, change))]
    return "; ".join(problems)


def patch(path: str, change: dict) -> str:
    """Apply `change`, a merge patch, to the Kubernetes object `path`; returns an error text, empty on success. A
    missing object is no error: it has no pods."""
    try:
        ask("PATCH", path, change).close()
    except urllib.error.HTTPError as error:
        return "" if error.code == http.HTTPStatus.NOT_FOUND else f"{error.code} {error.reason}"
    except OSError as error:
        return str(error)
    return ""


def ask(method: str, path: str, change: dict | None = None) -> http.client.HTTPResponse:
    """Send a request to the Kubernetes API about the object `path`, GROUP/VERSION/KIND/NAME. `method`: of HTTP;
    `change`: the request's body as JSON, None for none. Raises OSError, or its subclass HTTPError."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    group, version, kind, name = path.split("/", 3)
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
    return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S, context=trust)


class ProbeHandler(CheckedRequestHandler):
    """Answers probes of a pod whose run is over."""

    def do_GET(self) -> None:
        self.send_response(http.HTTPStatus.OK)
        self.end_headers()
        self.wfile.write(b"over\n")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def answering_probes(port: int) -> Iterator[None]:
    """Context manager that answers the pod's health probes at `port`."""
    with http.server.ThreadingHTTPServer(("0.0.0.0", port), ProbeHandler) as server:
        PartThread("http", server.serve_forever, POLL_S).start()
        yield
        server.shutdown()


if __name__ == "__main__":
    sys.exit(BrokerContainer(sys.argv[1], int(sys.argv[2])).run_program(sys.argv[3:]))
