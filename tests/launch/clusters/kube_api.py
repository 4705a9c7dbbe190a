"""A small fake of Kubernetes' API, as much as kubectl and a pod of April's ask of it, over HTTPS.

`python -m tests.launch.clusters.kube_api FOLDER HOST PORT CERTIFICATE KEY` keeps its objects in `objects.json` of the
folder. What a kubelet would know it reads there: `pods.json`, and a pod's log. Whoever shows the token ADMIN may do
anything, another token is a service account, which may do what Roles say.
"""

import json
import ssl
import sys
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import RLock
from urllib.parse import parse_qsl, urlsplit

ADMIN = "admin"
KINDS = {
    "v1": {"configmaps": "ConfigMap", "services": "Service", "serviceaccounts": "ServiceAccount", "pods": "Pod"},
    "apps/v1": {"statefulsets": "StatefulSet", "deployments": "Deployment"},
    "batch/v1": {"jobs": "Job"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
}
SCALED = ("statefulsets", "deployments")
VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
ANY = ["create", "delete", "get", "list", "patch"]


class Refusal(Exception):
    """(status, reason)"""


class Store:
    """The objects, by (resource, namespace, name)."""

    def __init__(self, folder: Path, on_change: Callable[[], None] = lambda: None):
        self.folder, self.on_change = folder, on_change
        self.lock = RLock()
        self.objects: dict[tuple[str, str, str], dict] = {}
        (folder / "pods.json").write_text('{"pods": [], "succeeded": {}}')
        self.write()

    def write(self) -> None:
        draft = self.folder / "objects.draft"
        draft.write_text(json.dumps(list(self.objects.values())))
        draft.replace(self.folder / "objects.json")
        self.on_change()

    def of_kubelet(self) -> dict:
        return json.loads((self.folder / "pods.json").read_text())

    def all(self, resource: str, namespace: str) -> list[dict]:
        if resource == "pods":
            return [pod for pod in self.of_kubelet()["pods"] if pod["metadata"]["namespace"] == namespace]
        return [one for (kind, space, _), one in self.objects.items() if (kind, space) == (resource, namespace)]

    def get(self, resource: str, namespace: str, name: str) -> dict:
        found = [one for one in self.all(resource, namespace) if one["metadata"]["name"] == name]
        if not found:
            raise Refusal(404, "NotFound")
        return found[0]

    def list(self, resource: str, namespace: str, labels: str, fields: str) -> list[dict]:
        found = [one for one in self.all(resource, namespace) if has(one["metadata"]["labels"], labels)]
        done = self.of_kubelet()["succeeded"]
        return [one for one in found if has({"status.successful": str(done.get(one["metadata"]["uid"], 0))}, fields)]

    def create(self, resource: str, namespace: str, one: dict) -> dict:
        one["metadata"] |= {
            "uid": str(uuid.uuid4()),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "resourceVersion": "1",
        }
        self.objects[resource, namespace, one["metadata"]["name"]] = one
        self.write()
        return one

    def change(self, one: dict, patch: dict) -> dict:
        merge(one, patch)
        self.write()
        return one

    def delete(self, resource: str, namespace: str, name: str) -> dict:
        one = self.objects.pop((resource, namespace, name))
        self.write()
        return one

    def may(self, account: str, group: str, resource: str, name: str, verb: str) -> bool:
        if account == ADMIN:
            return True
        bound = [
            one["roleRef"]["name"]
            for (kind, _, _), one in self.objects.items()
            if kind == "rolebindings" and any(subject["name"] == account for subject in one["subjects"])
        ]
        rules = [
            rule
            for (kind, _, role), one in self.objects.items()
            for rule in (one["rules"] if kind == "roles" and role in bound else [])
        ]
        return any(
            group in rule["apiGroups"] and resource in rule["resources"]
            and name in rule["resourceNames"] and verb in rule["verbs"]
            for rule in rules
        )  # fmt: skip


def has(facts: dict[str, str], selector: str) -> bool:
    wanted = [pair.replace("==", "=").split("=") for pair in selector.split(",") if pair]
    return all(facts.get(key) == value for key, value in wanted)


def merge(one: dict, patch: dict) -> None:
    """A merge patch; kubectl's strategic ones differ in lists, which no test changes."""
    for key, value in patch.items():
        if value is None:
            one.pop(key, None)
        elif isinstance(value, dict) and isinstance(one.get(key), dict):
            merge(one[key], value)
        elif not key.startswith("$"):
            one[key] = value


def scale_of(one: dict) -> dict:
    metadata = {key: one["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
    count = {"replicas": one["spec"]["replicas"]}
    return {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": metadata, "spec": count, "status": count}


def discovery(path: str) -> dict:
    """Which resources there are, and that the server itself looks for misspelt fields."""
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [{"groupVersion": each, "version": "v1"} for each in KINDS if "/" in each]
        groups = [
            {"name": one["groupVersion"].split("/")[0], "versions": [one], "preferredVersion": one} for one in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        return {"paths": {place(each): {"serverRelativeURL": f"/openapi/v3/{place(each)}"} for each in KINDS}}
    api = next((each for each in KINDS if path in (f"/{place(each)}", f"/openapi/v3/{place(each)}")), "")
    if not api:
        raise Refusal(404, "NotFound")
    if path.startswith("/openapi"):
        return {"openapi": "3.0.0", "info": {"title": "fake", "version": "1"}, "paths": {
            f"/{place(api)}/namespaces/{{namespace}}/{resource}/{{name}}": {"patch": {
                "parameters": [{"name": "fieldValidation", "in": "query"}], "responses": {},
                "x-kubernetes-group-version-kind": {"group": group_of(api), "version": "v1", "kind": kind},
            }} for resource, kind in KINDS[api].items()
        }}  # fmt: skip
    resources = []
    for resource, kind in KINDS[api].items():
        singular = {"name": resource, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": ANY}
        resources.append(singular)
        if resource in SCALED:
            sub = {"name": f"{resource}/scale", "kind": "Scale", "group": "autoscaling", "version": "v1"}
            resources.append(singular | sub | {"singularName": "", "verbs": ["get", "patch"]})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": resources}


def place(api: str) -> str:
    return f"apis/{api}" if "/" in api else f"api/{api}"


def group_of(api: str) -> str:
    return api.split("/")[0] if "/" in api else ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        split = urlsplit(self.path)
        try:
            with self.store.lock:
                found = self.find(split.path, dict(parse_qsl(split.query)), json.loads(body or b"{}"))
            self.send(200, found if isinstance(found, bytes) else json.dumps(found).encode())
        except Refusal as refusal:
            code, reason = refusal.args
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
            self.send(code, json.dumps(status | {"message": f"{reason}: {split.path}"}).encode())

    do_GET = do_POST = do_PATCH = do_DELETE = answer

    def send(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def find(self, path: str, query: dict[str, str], body: dict) -> dict | bytes:
        before, _, after = path.partition("/namespaces/")
        api = before.removeprefix("/apis/").removeprefix("/api/")
        if not after:
            return discovery(path)
        namespace, resource, name, sub = [*after.split("/"), "", ""][:4]
        store, verb = self.store, VERBS[self.command]
        account = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not store.may(account, group_of(api), f"{resource}/{sub}" if sub else resource, name, verb):
            raise Refusal(403, "Forbidden")
        if verb == "create":
            return store.create(resource, namespace, body)
        if not name:
            selectors = query.get("labelSelector", ""), query.get("fieldSelector", "")
            items = store.list(resource, namespace, *selectors)
            return {"kind": f"{KINDS[api][resource]}List", "apiVersion": api, "metadata": {}, "items": items}
        one = store.get(resource, namespace, name)
        if sub == "log":
            return (store.folder / f"{name}.log").read_bytes()
        if verb == "delete":
            return store.delete(resource, namespace, name)
        if verb == "patch":
            store.change(one, body)
        return scale_of(one) if sub == "scale" else one

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def serve(store: Store, host: str, port: int, certificate: Path, key: Path) -> ThreadingHTTPServer:
    """A server that has yet to `serve_forever`."""
    server = ThreadingHTTPServer((host, port), type("OfStore", (Handler,), {"store": store}))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


def kubeconfig(file: Path, host: str, port: int, certificate: Path) -> Path:
    """By which kubectl finds it."""
    cluster = {"server": f"https://{host}:{port}", "certificate-authority": str(certificate)}
    named = {"cluster": cluster, "user": {"token": ADMIN}, "context": {"cluster": "fake", "user": "fake"}}
    listed = {f"{kind}s": [{"name": "fake", kind: content}] for kind, content in named.items()}
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "fake"} | listed))
    return file


if __name__ == "__main__":
    folder, host, port, certificate, key = sys.argv[1:]
    made = serve(Store(Path(folder)), host, int(port), Path(certificate), Path(key))
    print("ready", flush=True)
    made.serve_forever()
