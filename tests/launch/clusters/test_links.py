"""Links that are slow, lose and are cut; hosts that are gone for a while, or for good. With CURVE."""

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from april.wire.security import keygen
from tests.support.hosts.hosts import Link, hosts
from tests.support.hosts.parts import parts
from tests.support.run_processes import assert_closed, restarts, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
SLOW = Link(delay_s=0.02, loss=0.02, rate="100mbit")
CUT_S = 5.0
PATIENCE_S = 300.0


@pytest.fixture
def start_parts(config_file, tmp_path):
    """start_parts(hosts, link, own, **options): a context of (hosts, parts) with a broker on the first of so many
    hosts; `own`: a folder of the run's that each has for itself"""
    keygen.make_folder(tmp_path / "keys")

    @contextmanager
    def begin(count, link=None, own="", **options):
        fixed = {
            "security.keys": tmp_path / "keys", "worker.device": "cpu", "learner.device": "cpu", "data.epochs": 1000,
        }  # fmt: skip
        chosen = fixed | {key.replace("__", "."): value for key, value in options.items()}
        run_dir = tmp_path / "runs" / "small"
        with (
            TemporaryDirectory(prefix="links") as state,
            hosts(count, Path(state), link, run_dir / own if own else None) as made,
            parts(made, config_file, run_dir, chosen) as run,
        ):
            run.broker(0)
            yield made, run

    return begin


def cut_for_a_while(made, run, host):
    made.cut(host)
    time.sleep(CUT_S)
    made.mend(host)


def train_on(run, steps):
    """So many more of them."""
    reached = len(run.steps()) + steps
    try:
        wait_until(lambda: len(run.steps()) >= reached, timeout_s=PATIENCE_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{run.said()}") from None


def test_a_slow_lossy_and_interrupted_link_costs_a_run_nothing(start_parts):
    with start_parts(3, SLOW, schedule__max_steps=16, learner__ranks=1) as (made, run):
        run.learner([1])
        run.join("worker", 2)
        train_on(run, 3)
        cut_for_a_while(made, run, 2)
        train_on(run, 2)
        cut_for_a_while(made, run, 1)
        run.wait(PATIENCE_S)
        found = assert_closed(run.run_dir)
    assert found["steps"] == 16 and found["state"] == "finished"
    assert found["tokens"]["emitted_unacked"] == found["tokens"]["refused"] == 0, "what was sent has arrived, once"
    assert not restarts(run.said()), "nobody had to begin anew"


def test_a_learner_on_two_hosts_survives_a_partition_the_loss_of_a_host_with_its_disk_and_a_killed_first(start_parts):
    options = {"schedule__max_steps": 100_000, "learner__ranks": 2, "learner__collective_timeout_s": 15}
    with start_parts(4, own="checkpoints", **options) as (made, run):
        run.learner([1, 2])
        run.join("worker", 0)
        train_on(run, 3)
        cut_for_a_while(made, run, 2)
        train_on(run, 3)
        made.cut(2)
        os.killpg(run.processes.pop("learner-1").pid, signal.SIGKILL)
        run.learner_node(1, [1, 3])
        train_on(run, 3)
        os.killpg(run.processes.pop("learner-0").pid, signal.SIGKILL)
        run.learner_node(0, [1, 3])
        train_on(run, 3)
        run.processes["broker"].terminate()
        run.wait(PATIENCE_S)
        found = assert_closed(run.run_dir)
        assert {path.name for path in made.disk(1).glob("step_*/__*")} == {"__0_0.distcp", "__1_0.distcp"}
    assert found["state"] == "stopped" and found["replays"]["different"] == 0
