"""Dashboards over runs that are made in a moment."""

import pytest
from starlette.testclient import TestClient

from april.dashboard.app import make_app
from april.dashboard.folder import Runs
from tests.dashboard.runs import make_run


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
    return looked_at(runs_folder)


@pytest.fixture
def ask(client):
    """ask(path) -> JSON; it must be answered"""

    def get(path, **query):
        answer = client.get(f"/api/{path}", params={key.replace("__", "."): value for key, value in query.items()})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return get
