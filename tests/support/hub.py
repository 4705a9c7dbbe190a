"""A hub of models and datasets on loopback: the answers that `huggingface_hub` asks for, from folders."""

import contextlib
import hashlib
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants

INFO = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)/revision/([^/?]+)")
TREE = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)/tree/([^/?]+)")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub(ThreadingHTTPServer):
    """commit = hub.push("model", "lab/tiny", folder); hub.address"""

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.root = root
        self.branches: dict[tuple[str, str], dict[str, str]] = {}
        """Commit by branch, of each (kind, name)."""
        self.gated: dict[str, str] = {}
        """The token that may read, of names whose files not everybody may."""
        self.asked: list[str] = []
        """Paths of all requests."""
        self.cut_at: int | None = None
        """Bytes of a file after which its connection breaks; None: never."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def push(self, kind: str, name: str, folder: Path, branch: str = "main") -> str:
        """Make a copy of the folder the newest commit of a branch; returns its hash."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        content = b"".join(str(path.relative_to(folder)).encode() + path.read_bytes() for path in files)
        commit = hashlib.sha1(f"{kind} {name}".encode() + content).hexdigest()
        shutil.copytree(folder, self.root / commit, dirs_exist_ok=True)
        self.branches.setdefault((kind, name), {})[branch] = commit
        return commit

    def fetched(self) -> set[str]:
        """Names of all files that were asked for."""
        return {match[4] for match in map(FILE.fullmatch, self.asked) if match}

    def handle_error(self, request, client_address):
        """A client that went away is no news."""


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        hub.asked.append(path)
        match = INFO.fullmatch(path) or TREE.fullmatch(path) or FILE.fullmatch(path)
        if not match:
            return self.answer(404, b"{}")
        kind = "dataset" if match[1] in ("dataset", "datasets/") else "model"
        branches = hub.branches.get((kind, match[2]))
        if branches is None:
            return self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        commit = branches.get(match[3], match[3])
        folder = hub.root / commit
        if not folder.is_dir():
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if match.re is INFO:
            return self.answer(200, json.dumps({"id": match[2], "sha": commit, "siblings": []}).encode())
        if match.re is TREE:
            files = [path for path in folder.rglob("*") if path.is_file()]
            listed = [
                {"type": "file", "path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "oid": "0"}
                for path in files
            ]
            return self.answer(200, json.dumps(listed).encode())
        if match[2] in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.gated[match[2]]}":
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if not (folder / match[4]).is_file():
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        content = (folder / match[4]).read_bytes()
        self.answer(200, content, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    def answer(self, status, content, headers=()):
        first = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1]) if status == 200 else 0
        self.send_response(206 if first else status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        cut, is_file = self.server.cut_at, "ETag" in dict(headers)
        if self.command == "GET":
            self.wfile.write(content[first : first + cut] if is_file and cut is not None else content[first:])
        if is_file and cut is not None:
            self.close_connection = True

    def log_message(self, format, *arguments):
        pass


@contextlib.contextmanager
def serving(root: Path):
    with Hub(root) as hub:
        threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}).start()
        yield hub
        hub.shutdown()


def use(monkeypatch, address, cache=None, offline=False):
    """Have this process ask the hub at an address, and no other."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    if cache:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
