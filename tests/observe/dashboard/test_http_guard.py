"""Access control of the dashboard: local browsers or the token; read-only, and without other origins."""

import subprocess
import sys

import pytest

from april.cli import main
from april.cli.dashboard import listen
from april.config import ConfigError
from april.observe.dashboard.folder import Runs

TOKEN = "sesame-of-the-test"


def test_without_a_token_only_loopback_host_names_are_accepted(looked_at, runs_folder):
    assert looked_at(runs_folder, host="127.0.0.1:8642").get("/api/runs").status_code == 200
    refused = looked_at(runs_folder, host="evil.example").get("/api/runs")
    assert refused.status_code == 403 and "demo" not in refused.text


def test_beyond_loopback_the_token_is_needed_and_stored_in_a_cookie(looked_at, runs_folder):
    client = looked_at(runs_folder, TOKEN, "gpu-1:8642")
    for path in ("/", "/api/runs", "/?token=guess", "/events/demo"):
        assert client.get(path).status_code == 401
    opened = client.get(f"/?token={TOKEN}")
    assert opened.status_code == 303 and TOKEN not in opened.headers["location"]
    assert {"HttpOnly", "SameSite=strict"} <= set(opened.headers["set-cookie"].split("; "))
    assert client.get("/api/runs").status_code == 200
    other = looked_at(runs_folder, TOKEN, "gpu-1:8642")
    assert other.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_pages_load_nothing_from_other_origins_and_only_get_is_allowed(client):
    answer = client.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ("/api/runs", "/api/runs/demo/samples"):
        assert client.post(path).status_code == 405
    assert client.get("/../../../pyproject.toml").status_code == 404


def test_a_port_that_is_taken_and_a_folder_without_runs_are_sentences(tmp_path, capsys, monkeypatch):
    taken = listen("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="cannot be listened on"):
        listen("127.0.0.1", taken.getsockname()[1])
    taken.close()
    with pytest.raises(ConfigError, match="neither a run folder"):
        Runs(str(tmp_path))
    assert main(["dashboard", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_other_commands_need_none_of_its_packages():
    """`april` is installed without the extra, too; then the dashboard says what it lacks."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['starlette', 'uvicorn', 'sse_starlette', 'pyarrow', 'torch']));"
        "from april.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for command, status, message in (
        (["status", "nowhere"], 2, "nowhere"),
        (["dashboard", "nowhere"], 2, "pip install 'april-rl[dashboard]'"),
    ):
        process = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
        assert process.returncode == status and message in process.stderr and "Traceback" not in process.stderr, (
            process.stderr
        )
