"""Each rank of a learner gathers a part of the weights and sends it; a worker gets all parts, or none. Real ranks, real
workers, real kills."""

import json
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE

import pytest
import torch
from safetensors.torch import save_file

from april.config import WeightsSection
from april.learner.weight_parts import divide
from april.util import clock
from april.weights.base import BaseWeights
from april.weights.channel import WORKER, TensorHead, connect_to_store, join, link_name
from april.weights.parts import GivePart, PartCommands, WithdrawPart
from april.weights.publisher import SILENCE_S
from april.weights.receiver import WeightReceiver
from april.weights.snapshot import byte_size, server_buckets
from april.weights.transports import GroupLink
from tests.support.channel_workers import PATIENCE_S, ChannelWorker
from tests.support.run_processes import wait_until
from tests.support.warm_imports import Popen
from tests.weights.part_ranks import adapted, weights

RANKS = 3


class Learner:
    """A learner of three ranks, which publishes each step when it is told to."""

    def __init__(
        self, folder, transport, publish_s=PATIENCE_S, transfer_s=PATIENCE_S, delta="off", senders="all", model=""
    ):
        self.folder, self.transport, self.delta, self.workers = folder, transport, delta, []
        arguments = [str(RANKS), str(folder / "ranks"), transport, str(publish_s), str(transfer_s), delta, senders]
        arguments.append(str(model))
        program = [sys.executable, "-m", "tests.weights.part_ranks"]
        pipes = {"stdout": PIPE, "stderr": PIPE, "text": True}
        self.ranks = [Popen([*program, str(rank), *arguments], **pipes) for rank in range(RANKS)]
        self.address = self.ranks[0].stdout.readline().strip()

    def start_workers(self, *names):
        deltas = ["--delta"] if self.delta == "auto" else []
        started = [ChannelWorker(self.address, self.transport, name, *deltas) for name in names]
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

    def start(*arguments, **options):
        started.append(Learner(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.end()


def total(step):
    return pytest.approx(sum(float(tensor.double().sum()) for tensor in weights(step).values()), abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(("transport", "delta"), [("collective", "auto"), ("shared_memory", "off")])
def test_a_worker_gets_the_parts_of_all_ranks_whenever_it_joins(learner, transport, delta):
    """Each part whole, or as a delta to what the worker has."""
    ranks = learner(transport, PATIENCE_S, PATIENCE_S, delta)
    first, second = ranks.start_workers("w0", "w1")
    figures = ranks.publish(0)
    assert [each.await_version("0.0") for each in (first, second)] == [total(0)] * 2
    assert figures["publish_bytes"] == sum(4 * tensor.numel() for tensor in weights(0).values())
    (late,) = ranks.start_workers("w2")
    assert late.await_version("0.0") == total(0)
    for step in (1, 2):
        figures = ranks.publish(step)
        assert (figures["publish_workers"], figures["publish_late"], figures["publish_lost"]) == (3, 0, 0)
        assert figures["publish_deltas"] == (3 if delta == "auto" else 0)
        assert [each.await_version(f"0.{step}") for each in (first, second, late)] == [total(step)] * 3


@pytest.mark.full
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


class Server:
    """An inference server of one rank that joins a channel's groups one after the other, `joins` of them, and each
    `late_s` seconds late. `links`: of the groups, by the rank that sends."""

    ranks, device = 1, "cpu"

    def __init__(self, joins=RANKS, late_s=0.0):
        self.joins, self.late_s, self.links = joins, late_s, []

    def join(self, invite):
        self.links = []
        for sender in range(self.joins):
            time.sleep(self.late_s)
            store = connect_to_store(invite.host, invite.port, invite.timeout_s)
            group = join(link_name(invite.channel, sender), store, WORKER, "gloo", invite.timeout_s, self.ranks)
            self.links.append(GroupLink(group, "gloo"))
        if self.joins < invite.senders:
            raise RuntimeError("the next rank is not reached")

    def leave(self, invite):
        pass

    def receive(self, part, sender, timeout_s=PATIENCE_S):
        """The sum over the tensors of one part."""
        return float(self.values(part, sender, timeout_s).double().sum())

    def values(self, part, sender, timeout_s=PATIENCE_S, dtype=torch.float32):
        """The values of one part, tensor by tensor."""
        sizes = [sum(map(byte_size, heads)) for heads in server_buckets(part.tensors, 16 << 20)]
        data = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self.links[sender].receive(data, clock.now() + timeout_s)
        return torch.cat(data).view(dtype)


@pytest.fixture
def serve():
    """serve(learner, server): the receiver of a worker, in whose stead `server` joins."""
    receivers = []

    def begin(ranks, server=None, name="w0", **options):
        receivers.append(WeightReceiver(WeightsSection(), f"uid-{name}", name, "cpu", server=server, **options))
        receivers[-1].connect(ranks.address)
        return receivers[-1]

    yield begin
    for each in receivers:
        each.close()


@pytest.mark.full
def test_a_server_has_time_to_join_all_ranks_and_each_sends_in_its_turn(learner, serve):
    """Joining takes longer than a single link may, and longer than a worker may be silent."""
    ranks, server = learner("collective", 60.0, 60.0), Server(late_s=2.0)
    assert RANKS * server.late_s > max(WeightsSection().join_deadline_s, SILENCE_S)
    receiver = serve(ranks, server)
    ranks.begin(0)
    wait_until(lambda: receiver.has_staged)
    staged, found = receiver.take(), 0.0
    for sender, part in enumerate(staged.manifest.parts):
        staged.post()
        found += server.receive(part, sender)
    receiver.loaded(staged.version)
    assert found == total(0)
    ranks.begin(1)
    wait_until(lambda: receiver.has_staged)
    staged = receiver.take()
    staged.post()
    server.receive(staged.manifest.parts[0], 0)
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        server.receive(staged.manifest.parts[1], 1, timeout_s=0.5)


def refusal(ranks):
    """The errors that rank 0 has written, once it has ended."""
    return ranks.ranks[0].communicate(timeout=PATIENCE_S)[1]


@pytest.mark.full
def test_a_learner_whose_other_ranks_no_worker_reaches_ends_with_a_sentence(learner, serve):
    ranks = learner("collective")
    serve(ranks, Server(joins=1))
    said = refusal(ranks)
    assert "key 'weights.senders' = 'all' has not worked: 3 times a worker reached rank 0" in said


@pytest.fixture
def model(tmp_path):
    """The folder of a base model."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(weights(9), folder / "model.safetensors")
    return folder


def merged(model, step):
    """The weights of a step where the model of a folder has an adapter, as one process merges them."""
    version = adapted(model, step)
    return dict(version.base.with_adapter(version.adapter, version.tensors))


@pytest.mark.full
@pytest.mark.parametrize(("delta", "is_adapter"), [("off", False), ("auto", False), ("off", True)])
def test_by_default_rank_0_sends_all_once_no_worker_has_reached_the_other_ranks(
    learner, serve, model, delta, is_adapter
):
    """Beginning with the version that none has got, which the ranks still keep in parts."""
    ranks = learner("collective", delta=delta, senders="auto", model=model if is_adapter else "")
    server, dtype = Server(joins=1), torch.bfloat16 if is_adapter else torch.float32
    receiver = serve(ranks, server)
    ranks.publish(0)
    for step in range(3):
        wait_until(lambda: receiver.has_staged)
        staged = receiver.take()
        (part,) = staged.manifest.parts
        staged.post()
        sent = merged(model, step) if is_adapter else weights(step)
        assert {head.name for head in part.tensors} == sent.keys()
        expected = torch.cat([sent[head.name].flatten() for head in part.tensors])
        assert torch.equal(server.values(part, 0, dtype=dtype), expected)
        receiver.loaded(staged.version)
        ranks.begin(step + 1)
    ranks.end()
    said = ranks.ranks[0].stderr.read()
    assert "rank 0 sends all weights from now on, since key 'weights.senders' = 'auto' has not worked" in said
    assert "listen where workers reach it (weights.host)" in said


@pytest.mark.full
def test_each_rank_merges_a_part_for_workers_without_the_adapter_s_base_and_others_get_the_adapter(
    learner, serve, model
):
    """The same bits as rank 0 would merge, when the worker comes late, too; and no rank has more than its share."""
    ranks, server = learner("collective", model=model), Server()
    beside = serve(ranks, name="w1", base=BaseWeights(model), adapts=lambda: True)
    figures = ranks.publish(0)
    without, alone = serve(ranks, name="w2"), serve(ranks, server, name="w3")
    for step in range(2):
        wait_until(lambda: beside.has_staged and without.has_staged and alone.has_staged)
        expected, trained = merged(model, step), adapted(model, step).tensors
        staged = [each.take() for each in (beside, without, alone)]
        assert all(torch.equal(tensor, trained[name]) for name, tensor in staged[0].tensors.items())
        assert staged[1].tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in staged[1].tensors.items())
        parts = staged[2].manifest.parts
        for sender, part in enumerate(parts):
            staged[2].post()
            sent = server.values(part, sender, dtype=torch.bfloat16)
            assert torch.equal(sent, torch.cat([expected[head.name].flatten() for head in part.tensors]))
        sizes = [part.total_bytes for part in parts]
        assert len(sizes) == RANKS and max(sizes) == expected["table.weight"].nbytes
        for receiver, each in zip((beside, without, alone), staged, strict=True):
            receiver.loaded(each.version)
        ranks.begin(step + 1)
    assert figures["publish_bytes"] == sum(tensor.nbytes for tensor in trained.values())


@pytest.fixture
def several_machines(monkeypatch):
    """The ranks of a learner are as if each were on a machine of its own."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))


def test_several_machines_that_listen_on_loopback_alone_are_refused(learner, several_machines):
    said = refusal(learner("collective"))
    assert "rank 0 would listen at 127.0.0.1, which only its own machine reaches" in said
    assert "set weights.host" in said


def test_by_default_rank_0_sends_all_where_other_machines_are_not_reached(learner, several_machines):
    ranks = learner("collective", senders="auto")
    (worker,) = ranks.start_workers("w0")
    ranks.publish(0)
    assert worker.await_version("0.0") == total(0)
    ranks.end()
    said = ranks.ranks[0].stderr.read()
    assert "rank 0 gathers and sends all weights, since key 'weights.senders' = 'auto' wants every rank" in said
    assert "rank 0 would listen at 127.0.0.1" in said and "set weights.host" in said


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


@pytest.mark.parametrize("ends_by", ["a lost rank", "the end"])
def test_nobody_waits_for_ranks_that_take_no_more_commands(monkeypatch, ends_by):
    lost = threading.Event()

    def broadcast(*arguments):
        if ends_by == "a lost rank":
            assert lost.wait(PATIENCE_S)
            raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    commands = PartCommands(group=None)
    commands.tell(WithdrawPart())
    with ThreadPoolExecutor() as channels:
        if ends_by == "the end":
            commands.close()
        asked = [channels.submit(commands.ask, GivePart(), lambda: "a part") for _ in range(2)]
        lost.set()
        for each in asked:
            with pytest.raises(RuntimeError):
                each.result(PATIENCE_S)
    with pytest.raises(RuntimeError, match="take no more commands"):
        commands.ask(GivePart(), lambda: "a part")
