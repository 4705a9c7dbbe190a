"""Dashboards over runs that are made in a moment, asked by a client or shown in a browser."""

import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from april.observe.dashboard.app import make_app
from april.observe.dashboard.folder import Runs
from tests.support.dashboard_runs import WIDE, make_run, steps_read
from tests.support.marks import SERVERS
from tests.support.run_processes import PATIENCE_S


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory):
    """With the runs `demo` and `other`."""
    folder = tmp_path_factory.mktemp("dashboard")
    for seed, name in enumerate(("demo", "other")):
        make_run(folder, name, seed=seed)
    return folder / "runs"


@pytest.fixture
def looked_at():
    """looked_at(what) -> a client of a dashboard of it, on this machine"""
    begun = []

    def begin(what, token="", host="localhost"):
        begun.append(Runs(str(what)))
        client = TestClient(make_app(begun[-1], token), base_url=f"http://{host}", follow_redirects=False)
        return client

    yield begin
    for runs in begun:
        runs.close()


@pytest.fixture
def client(looked_at, runs_folder):
    return steps_read(looked_at(runs_folder))


@pytest.fixture
def ask(client):
    """ask(path) -> JSON; it must be answered"""

    def get(path, **query):
        answer = client.get(f"/api/{path}", params={key.replace("__", "."): value for key, value in query.items()})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return get


# --- in a browser ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=SERVERS["browser"], args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def serve():
    """serve(what) -> address of a dashboard in a process of its own"""
    processes = []

    def begin(what):
        command = [sys.executable, "-m", "april.cli", "dashboard", str(what), "--port", "0"]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return processes[-1].stdout.readline().removeprefix("dashboard: ").strip()

    yield begin
    for process in processes:
        process.terminate()
        process.wait(PATIENCE_S)


@pytest.fixture
def open_page(chromium):
    """open_page(address, **of the context) -> a page, on which nothing may go wrong and nothing come from elsewhere"""
    pages, wrong = [], []

    def begin(address, viewport=WIDE, **context):
        page = chromium.new_context(viewport=viewport, **context).new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        host = urlsplit(address).netloc
        page.on("console", lambda said: said.type in ("error", "warning") and wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: urlsplit(asked.url).netloc != host and wrong.append(asked.url))
        page.goto(address)
        pages.append(page)
        return page

    yield begin
    for page in pages:
        page.context.close()
    assert not wrong
