"""Processes that are ended with their test."""

import pytest

from tests.run.processes import APRIL, Job, assert_closed


@pytest.fixture
def run_dir(tmp_path):
    """Of the small configuration."""
    return tmp_path / "runs" / "small"


@pytest.fixture
def start(tmp_path):
    """start(name, command) -> Job"""
    jobs = []

    def begin(name, command):
        jobs.append(Job(command, tmp_path / f"{name}.log"))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


@pytest.fixture
def start_run(start, config_file):
    """start_run(*overrides) -> Job of `april run` on the small configuration"""
    return lambda *overrides: start("output", [*APRIL, "run", str(config_file), *overrides])


@pytest.fixture
def finish_run(start_run, run_dir):
    """finish_run(*overrides) -> (Job, summary) of one that has come to its end"""

    def finish(*overrides):
        job = start_run(*overrides)
        assert job.wait() == 0, job.output
        return job, assert_closed(run_dir)

    return finish
