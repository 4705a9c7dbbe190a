"""Processes that are ended with their test, for the tests of every folder."""

import pytest

from tests.run.gate import Gate
from tests.run.processes import APRIL, Job, assert_closed, wait_until


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
