"""Fixtures of most tests: a small run, its processes, object stores; and the suite's collection rules."""

import os
import re
import signal
import uuid

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("april.workers.engines.conformance", "april.broker.conformance", "tests.support")

from april.util.objects import ObjectStore  # noqa: E402
from tests.support import hub as hubs  # noqa: E402
from tests.support import object_stores, open_brokers, small_run  # noqa: E402
from tests.support.marks import SERVERS  # noqa: E402
from tests.support.run_processes import APRIL, Job, assert_closed, wait_until  # noqa: E402
from tests.support.small_run import make_prompts, write_config  # noqa: E402
from tests.support.step_gate import Gate  # noqa: E402
from tests.support.turns import waits_for_its_turn  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in background ignores it
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
torch.set_num_threads(1)


BEFORE = pytest.StashKey[set]()
"""Files in the checkout when the tests began."""
FOLDERS = pytest.StashKey[dict]()
"""Collected folders by path."""


FEW = 2000
"""Where fewer tests are collected, a part was asked for, and all of it is run."""
LONGEST_NAME = 6000
"""Characters in a test's name: a parameter of many megabytes would be in each report, and in each process."""
CACHES = re.compile(r"__pycache__|\..*|.*\.egg-info")
"""Names of cache folders, which may be left behind."""


def checkout(config):
    """Paths of all files and folders in the checkout, without caches."""
    found = set()
    for folder, folders, names in os.walk(config.rootpath):
        folders[:] = [name for name in folders if not CACHES.fullmatch(name)]
        found |= {os.path.join(folder, name) for name in (*folders, *names)}
    return found


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):
        session.config.stash[BEFORE] = checkout(session.config)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail if the suite has left files behind in the checkout."""
    leftover = checkout(session.config) - session.config.stash.get(BEFORE, set())
    if BEFORE in session.config.stash and leftover:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"\nleft behind in the checkout: {', '.join(sorted(leftover))}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_collect_directory(path, parent):
    """Collect each folder once. Otherwise pytest 9.1 may make a second node of a folder, without the fixtures of its
    conftest.py (pytest-dev/pytest#14635)."""
    return parent.session.stash.setdefault(FOLDERS, {}).setdefault(path, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Each process begins a folder at another of its files, so that they share what the first to import a file does for
    all: compiling it, and rewriting its asserts."""
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker and isinstance(collector, pytest.Directory):
        share = int(worker["workerid"].removeprefix("gw")) / worker["workercount"]
        begin = int(share * len(report.result))
        report.result[:] = report.result[begin:] + report.result[:begin]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Tests that need a server or program are part of the full suite and run in one process per server; they are
    skipped if it is not installed. A test gets one group only, since xdist makes a third one of two. A name with an
    address in it is another in each process, and xdist would run nothing."""
    if addressed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{addressed[0]}: give the parameters ids of their own")
    if long := [item.nodeid for item in items if len(item.nodeid) > LONGEST_NAME]:
        raise pytest.UsageError(f"{long[0][:LONGEST_NAME]}...: give the parameters short ids, each process writes them")
    missing = {mark for mark, program in SERVERS.items() if not (config.rootpath / program).exists()}
    for item in items:
        needed = [mark for mark in SERVERS if item.get_closest_marker(mark)]
        if needed:
            item.add_marker(pytest.mark.full)
            item.add_marker(pytest.mark.xdist_group(needed[0]))
        for mark in missing.intersection(needed):
            item.add_marker(pytest.mark.skip(reason=f"needs {SERVERS[mark]} (launch/install-{mark}.sh)"))
    if len(items) > FEW and not config.getoption("--every"):
        later = {item for item in items if waits_for_its_turn(item)}
        config.hook.pytest_deselected(items=list(later))
        items[:] = [item for item in items if item not in later]
    # The longest first: begun last they would leave the other processes idle.
    items.sort(key=lambda item: (-limit_of(item), item.path))


def limit_of(item):
    """A test's own time limit in seconds, which the longest have; 0 for others."""
    mark = item.get_closest_marker("timeout")
    return mark.args[0] if mark else 0


def pytest_addoption(parser):
    parser.addoption("--every", action="store_true", help="also the long tests that do not have their turn")


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    return small_run.make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    return make_prompts(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def conversations():
    yield
    open_brokers.close_all()


@pytest.fixture
def config_file(tmp_path, policy_folder, data_folder):
    return write_config(tmp_path, policy_folder, data_folder)


@pytest.fixture
def server_python(tmp_path):
    """A fake interpreter that reports the version of an installed server."""
    (tmp_path / "python").write_text("#!/bin/sh\necho 0.5.23\n")
    (tmp_path / "python").chmod(0o755)
    return str(tmp_path / "python")


@pytest.fixture
def run_dir(tmp_path):
    """Run folder of the small configuration."""
    return tmp_path / "runs" / "small"


@pytest.fixture
def start(tmp_path):
    """start(name, command, **options of Job): a started Job."""
    jobs = []

    def begin(name, command, **options):
        jobs.append(Job(command, tmp_path / f"{name}.log", **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


@pytest.fixture
def start_run(start, config_file):
    """start_run(*overrides): Job of `april run` on the small configuration."""
    return lambda *overrides: start("output", [*APRIL, "run", str(config_file), *overrides])


@pytest.fixture
def start_broker(start, config_file, run_dir):
    """start_broker(*overrides) -> Job of `april broker` on the small configuration, once it can be reached at its
    `address` and `http`"""

    def begin(*overrides):
        (run_dir / "http").unlink(missing_ok=True)
        job = start("broker", [*APRIL, "broker", str(config_file), *overrides])
        wait_until((run_dir / "http").exists, job)
        job.run_dir = run_dir
        job.address, job.http = ((run_dir / name).read_text() for name in ("address", "http"))
        return job

    return begin


@pytest.fixture
def gate(run_dir, tmp_path, monkeypatch):
    """start_run(*gate.hold(2)): the run waits after its second or third step until gate.open()."""
    return Gate(tmp_path / "gate", run_dir, monkeypatch)


@pytest.fixture
def finish_run(start_run, run_dir):
    """finish_run(*overrides): (Job, summary) of a finished run."""

    def finish(*overrides):
        job = start_run(*overrides)
        assert job.wait() == 0, job.output
        return job, assert_closed(run_dir)

    return finish


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of models and datasets without any, which this process asks, with an empty cache."""
    with hubs.serving(tmp_path / "hub") as hub:
        hubs.use(monkeypatch, hub.address, tmp_path / "cache")
        yield hub


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """The address of an S3 server on loopback."""
    with object_stores.s3_server(tmp_path_factory.mktemp("s3") / "log") as address:
        yield address


@pytest.fixture
def s3(s3_server, monkeypatch):
    """Sets the environment variables of S3 clients; a URL in a new bucket."""
    return object_stores.new_bucket(s3_server, monkeypatch)


@pytest.fixture(params=object_stores.KINDS)
def store_url(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return f"file://{tmp_path}/the store" if request.param == "file" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def objects(store_url):
    return ObjectStore(store_url, timeout_s=60)
