"""Exit status of a learner: errors that a restart cannot fix are distinguished from others."""

import sys
from subprocess import PIPE

import pytest

from april import config as configuration
from april.learner import rank
from april.learner.attention import PackedAttentionError
from april.learner.loading import ModelError
from april.learner.loop import Diverged
from april.util.lifetime import REFUSED
from april.wire.sockets.broker import BrokerUnreachable
from tests.support.warm_imports import Popen


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Diverged("3 batches in a row had no finite loss"), REFUSED),
        (ModelError("the model's head has a bias"), REFUSED),
        (PackedAttentionError("the model uses sliding_window"), REFUSED),
        (configuration.ConfigError("key 'learner.compute'"), REFUSED),
        (BrokerUnreachable("the broker is gone"), 1),
        (RuntimeError("a collective has failed"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_that_a_restart_cannot_fix_end_the_run_and_others_are_retried(error, status):
    def train(address):
        raise error

    assert rank.status_of_training("april.learner", train, "tcp://127.0.0.1:1") == status


def test_torchrun_does_not_retry_a_refusal(tmp_path):
    (tmp_path / "run.toml").write_text('[model]\npath = "nowhere"\n[data]\npath = "unused.jsonl"\n')
    launch = ["-m", "april.learner.launch", "--nproc-per-node=1", "--max-restarts=1"]
    part = ["-m", "april.learner", str(tmp_path / "run.toml"), "--connect", "tcp://127.0.0.1:1"]
    learner = Popen([sys.executable, *launch, *part], stderr=PIPE, text=True)
    _, said = learner.communicate(timeout=120)
    assert learner.returncode == REFUSED, said
    assert said.count("key 'model.path' = '") == 1, said


@pytest.mark.full
def test_the_launcher_says_which_rank_a_signal_has_ended(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, time\nos.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(100)\n")
    ranks = Popen(
        [sys.executable, "-m", "april.learner.launch", "--nproc-per-node=2", str(program)], stderr=PIPE, text=True
    )
    _, said = ranks.communicate(timeout=120)
    assert ranks.returncode == 1 and "rank 1 was ended by SIGKILL; if nobody has sent it, memory ran out" in said
