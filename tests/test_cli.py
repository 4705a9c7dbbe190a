"""The command `april`: its help, and its time to start."""

import codecs
import os
import subprocess
import sys
import urllib.request
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest

from april.cli import build_parser, keep_proxies_off_loopback
from april.cli.command import COMMANDS

build_parser()


@pytest.mark.parametrize(
    "command", sorted(COMMANDS, key=lambda command: command.name), ids=lambda command: command.name
)
def test_a_command_and_its_options_have_help_in_sentences(command):
    texts = [command.function.__doc__, *(option.settings["help"] for option in command.options)]
    for text in texts:
        assert text[0].isupper() or text.startswith("lengths: "), text
        assert text.endswith("."), text


def test_building_the_parser_imports_nothing_heavy():
    """Each start of a part builds it; the listing of keys imports the configuration only when help is printed."""
    program = "import sys; from april.cli import build_parser; build_parser(); print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"april.config", "numpy", "pydantic", "torch", "zmq"} & set(done.stdout.splitlines())


def test_a_proxy_is_not_asked_for_what_is_on_this_machine(monkeypatch):
    for variable in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(variable, "http://proxy.invalid:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "inside.example")
    keep_proxies_off_loopback()
    assert os.environ["no_proxy"].split(",")[0] == "inside.example" == os.environ["NO_PROXY"].split(",")[0]
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for ask in (httpx.head, urllib.request.urlopen):
            ask(f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()


@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
def test_a_star_still_means_every_host(monkeypatch, variable):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "*" if name == variable else "")
    keep_proxies_off_loopback()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "*"


@pytest.mark.full
def test_files_are_utf8_whatever_the_locale(tmp_path, monkeypatch):
    """A configuration with a byte-order mark and another script is read where the locale is ASCII."""
    config = tmp_path / "run.toml"
    config.write_bytes(codecs.BOM_UTF8 + '[model]\npath = "模型"\n[data]\npath = "x"\n'.encode())
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "april.cli", "run", str(config), "--dry-run"],
        capture_output=True,
        env=os.environ | ascii_only,
    )
    assert done.returncode == 2 and "模型" in done.stdout.decode()
