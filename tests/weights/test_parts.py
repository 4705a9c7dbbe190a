"""Each rank of a learner gathers a part of the weights and sends it; a worker gets all parts, or none. Real ranks, real
workers, real kills."""

import json
import signal
import sys
from subprocess import PIPE

import pytest

from april.learner.weight_parts import divide
from april.weights.channel import TensorHead
from april.weights.snapshot import byte_size
from tests.support.warm_imports import Popen
from tests.weights.part_ranks import weights
from tests.weights.test_channels import PATIENCE_S, ChannelWorker

RANKS = 3


class Learner:
    """A learner of three ranks, which publishes each step when it is told to."""

    def __init__(self, folder, transport, publish_s=PATIENCE_S, transfer_s=PATIENCE_S):
        self.folder, self.transport, self.workers = folder, transport, []
        arguments = [str(RANKS), str(folder / "ranks"), transport, str(publish_s), str(transfer_s)]
        program = [sys.executable, "-m", "tests.weights.part_ranks"]
        self.ranks = [Popen([*program, str(rank), *arguments], stdout=PIPE, text=True) for rank in range(RANKS)]
        self.address = self.ranks[0].stdout.readline().strip()

    def start_workers(self, *names):
        started = [ChannelWorker(self.address, self.transport, name) for name in names]
        self.workers += started
        assert all(each.has_started() for each in started)
        return started

    def begin(self, step):
        (self.folder / f"publish_{step}").touch()

    def publish(self, step):
        self.begin(step)
        return self.figures()

    def figures(self):
        return json.loads(self.ranks[0].stdout.readline())

    def end(self):
        for worker in self.workers:
            worker.end()
        for rank in self.ranks:
            rank.kill()
            rank.wait()


@pytest.fixture
def learner(tmp_path):
    started = []

    def start(*arguments):
        started.append(Learner(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.end()


def total(step):
    return pytest.approx(sum(float(tensor.double().sum()) for tensor in weights(step).values()), abs=1e-4)


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_a_worker_gets_the_parts_of_all_ranks_whenever_it_joins(learner, transport):
    ranks = learner(transport)
    first, second = ranks.start_workers("w0", "w1")
    figures = ranks.publish(0)
    assert [each.await_version("0.0") for each in (first, second)] == [total(0)] * 2
    assert figures["publish_bytes"] == sum(4 * tensor.numel() for tensor in weights(0).values())
    (late,) = ranks.start_workers("w2")
    assert late.await_version("0.0") == total(0)
    for step in (1, 2):
        figures = ranks.publish(step)
        assert (figures["publish_workers"], figures["publish_late"], figures["publish_lost"]) == (3, 0, 0)
        assert [each.await_version(f"0.{step}") for each in (first, second, late)] == [total(step)] * 3


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_a_killed_or_hung_worker_costs_its_own_channel_on_every_rank(learner, transport):
    ranks = learner(transport, 8.0, 6.0)
    killed, hung, other = ranks.start_workers("w0", "w1", "w2")
    ranks.publish(0)
    for each in (killed, hung, other):
        each.await_version("0.0")
    ranks.begin(1)  # both are ended while parts are gathered or on their way
    killed.end()
    hung.process.send_signal(signal.SIGSTOP)
    assert other.await_version("0.1") == total(1)
    ranks.figures()
    hung.process.send_signal(signal.SIGCONT)
    (again,) = ranks.start_workers("w0")
    ranks.publish(2)
    assert [each.await_version("0.2") for each in (again, hung, other)] == [total(2)] * 3


def test_tensors_are_divided_evenly_and_what_a_server_concatenates_stays_together():
    heads = [TensorHead("embed.weight", "bfloat16", [3000, 64]), TensorHead("norm.weight", "float32", [64])]
    for layer in range(8):
        for module, rows in (("q", 256), ("k", 64), ("v", 64), ("o", 256)):
            heads.append(TensorHead(f"layers.{layer}.self_attn.{module}_proj.weight", "bfloat16", [rows, 64]))
    owners = divide(heads, 4)
    loads = [sum(byte_size(h) for h, owner in zip(heads, owners, strict=True) if owner == rank) for rank in range(4)]
    assert max(loads) <= 1.3 / 4 * sum(loads) * 1.01 or max(loads) == byte_size(heads[0])
    by_name = dict(zip((head.name for head in heads), owners, strict=True))
    for layer in range(8):
        assert len({by_name[f"layers.{layer}.self_attn.{module}_proj.weight"] for module in "qkv"}) == 1
