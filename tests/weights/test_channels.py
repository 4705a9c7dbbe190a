"""Weights reach every worker, over each transport; a dead, hung or new worker does not affect the others. Real
processes, real gloo, real shared memory."""

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from april.config import ConfigError, WeightsSection
from april.util import clock
from april.weights import channel
from april.weights.base import AdapterWeights, BaseWeights
from april.weights.canary import Canary
from april.weights.channel import Adapter
from april.weights.publisher import SILENCE_S, WeightPublisher
from april.weights.receiver import WeightReceiver
from april.weights.snapshot import buckets
from april.weights.transports import OtherMachine, SharedMemoryTransport
from april.wire.message import Version
from tests.support.channel_workers import PATIENCE_S, ChannelWorker, take, total, weights
from tests.support.listening_addresses import listeners
from tests.support.marks import full
from tests.support.run_processes import wait_until


@pytest.fixture
def patience(monkeypatch):
    """Deadlines long enough for workers that wait for a CPU core."""
    monkeypatch.setattr("april.weights.publisher.SILENCE_S", PATIENCE_S)
    return WeightsSection(publish_deadline_s=PATIENCE_S, transfer_deadline_s=PATIENCE_S)


IMPATIENCE = WeightsSection(publish_deadline_s=8.0, transfer_deadline_s=6.0)
"""Deadlines for tests in which a worker is killed or hangs."""
impatient = pytest.mark.parametrize("patience", [IMPATIENCE], ids=["impatient"])


@pytest.fixture(params=["collective", "shared_memory"])
def transport(request):
    return request.param


collective = pytest.mark.parametrize("transport", ["collective"])
shared_memory = pytest.mark.parametrize("transport", ["shared_memory"])


@pytest.fixture
def publisher(patience, transport):
    publisher = WeightPublisher(patience.model_copy(update={"transport": transport}), "test", "cpu")
    yield publisher
    publisher.close()


@pytest.fixture
def worker(publisher):
    workers = []

    def start(*names, model=()):
        started = [ChannelWorker(publisher.address, publisher.config.transport, name, *model) for name in names]
        workers.extend(started)
        assert all(each.has_started() for each in started)
        return started if len(started) > 1 else started[0]

    yield start
    for each in workers:
        each.end()


@pytest.fixture
def receive(publisher):
    """receive(**options) -> the receiver of a worker in this process"""
    made = []

    def receive(**options):
        made.append(WeightReceiver(publisher.config, "uid", "w0", "cpu", **options))
        made[-1].connect(publisher.address)
        return made[-1]

    yield receive
    for each in made:
        each.close()


@collective
def test_a_channel_listens_only_at_the_learner_s_host_whatever_interface_its_ranks_use(publisher, worker, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    first = worker("w0")
    publisher.publish(Version(0, 0), weights(0))
    assert first.await_version(Version(0, 0)) == total(0)
    assert listeners(first.process.pid) == {publisher.config.host}
    assert publisher.config.host in listeners() and {"::", "0.0.0.0"}.isdisjoint(listeners())


def test_a_host_of_another_machine_is_refused_in_one_sentence():
    with pytest.raises(ConfigError, match=r"key 'weights.host' = '192.0.2.1' "):
        WeightPublisher(WeightsSection(host="192.0.2.1"), "test", "cpu")


def test_every_worker_gets_every_version(publisher, worker):
    workers = worker("w0", "w1")
    publisher.publish(Version(0, 0), weights(0))
    assert [each.await_version(Version(0, 0)) for each in workers] == [total(0)] * 2
    for step in range(1, 4):
        figures = publisher.publish(Version(0, step), weights(step))
        assert figures["publish_workers"] == 2 and figures["publish_late"] == 0
        assert [each.await_version(Version(0, step)) for each in workers] == [total(step)] * 2


MODEL = {
    "layer.weight": torch.arange(600_000.0).reshape(3000, 200).bfloat16() / 1000,
    "table.weight": torch.ones(30, 20).bfloat16(),
    "head.weight": torch.ones(30, 20).bfloat16(),
    "norm.weight": torch.full((20,), 0.5).bfloat16(),
}


@pytest.fixture
def make_model(tmp_path):
    """make(name, files, change) -> folder of the model in so many files, with `change` added to all weights."""

    def make(name, files=1, change=0.0):
        folder, names = tmp_path / name, sorted(MODEL)
        folder.mkdir()
        for i in range(files):
            save_file({key: MODEL[key] + change for key in names[i::files]}, folder / f"model-{i}.safetensors")
        return folder

    return make


def adapted(folder, step):
    """An adapter version of a model whose head is tied to its embedding table, which is trained whole."""
    generator = torch.Generator().manual_seed(step)
    trained = {
        "layer.lora_A": torch.randn(4, 200, generator=generator),
        "layer.lora_B": torch.randn(3000, 4, generator=generator),
        "table.weight": torch.randn(30, 20, generator=generator),
    }
    base = BaseWeights(folder)
    return AdapterWeights(trained, Adapter(base.checksum, 0.25, "float32", ["head.weight"]), base)


def total_with_adapter(step):
    trained = adapted(Path("unused"), step).tensors
    layer = MODEL["layer.weight"].float() + 0.25 * (trained["layer.lora_B"] @ trained["layer.lora_A"])
    parts = (layer, trained["table.weight"], MODEL["norm.weight"])
    return pytest.approx(sum(float(each.double().sum()) for each in parts), abs=1e-3)


@pytest.mark.parametrize("transport", ["collective", full("shared_memory")])
def test_an_adapter_is_sent_alone_to_workers_with_its_base_model_and_all_weights_to_others(
    publisher, worker, make_model, caplog
):
    """However the model is divided into files, and for workers that join late, too."""
    caplog.set_level("INFO", logger="april.weights.merged")
    own = make_model("learner")
    first = worker("w0", model=[make_model("same", files=2)])
    size = publisher.publish(Version(0, 0), adapted(own, 0))["publish_bytes"]
    assert first.await_version(Version(0, 0)) == total_with_adapter(0)
    assert size == 4 * (4 * 200 + 3000 * 4 + 30 * 20) < 0.05 * 4 * 600_000
    assert "all weights" not in caplog.text
    others = [worker("w1", model=[make_model("other", change=1.0)]), worker("w2"), worker("w3", model=[own])]
    assert [each.await_version(Version(0, 0)) for each in others] == [total_with_adapter(0)] * 3
    figures = publisher.publish(Version(0, 1), adapted(own, 1))
    assert figures["publish_workers"] == 4 and figures["publish_late"] == figures["publish_wrong"] == 0
    assert [each.await_version(Version(0, 1)) for each in [first, *others]] == [total_with_adapter(1)] * 4
    not_adapting = [
        name for name in ("w0", "w1", "w2", "w3") if f"{name} does not take adapters of this model" in caplog.text
    ]
    assert not_adapting == ["w1", "w2"]


class SlowPeer:
    """A peer that takes 10 s per bucket of a fake clock. `waits_s`: the timeout of each wait; `under_way`: the pending
    buckets at each start of one."""

    def __init__(self, monkeypatch):
        self.time, self.waits_s, self.begun, self.under_way = 1000.0, [], 0, []
        monkeypatch.setattr(clock, "now", lambda: self.time)

    def broadcast(self, tensors, options):
        self.begun += 1
        self.under_way.append(self.begun - len(self.waits_s))
        assert options.timeout.total_seconds() == 1030.0 - self.time
        return self

    def wait(self, timeout):
        self.waits_s.append(timeout.total_seconds())
        self.time += 10.0


def test_the_deadline_of_a_transfer_is_that_of_all_its_buckets_together(monkeypatch):
    peer = SlowPeer(monkeypatch)
    with pytest.raises(TimeoutError, match=r"weights\.transfer_deadline_s"):
        channel.transfer(peer, [torch.zeros(1)] * 5, None, clock.now() + 30.0)
    assert peer.waits_s == [30.0, 20.0, 10.0]


def test_a_bucket_is_on_its_way_before_the_last_has_arrived(monkeypatch):
    peer = SlowPeer(monkeypatch)
    channel.transfer(peer, [torch.zeros(1)] * 3, None, clock.now() + 30.0)
    assert peer.under_way == [1, 2, 2] and len(peer.waits_s) == 3


@pytest.mark.full
@impatient
def test_a_killed_worker_does_not_keep_the_others_from_their_weights(publisher, worker):
    victim, other = worker("w0", "w1")
    publisher.publish(Version(0, 0), weights(0))
    for each in (victim, other):
        each.await_version(Version(0, 0))
    victim.end()
    figures = publisher.publish(Version(0, 1), weights(1))
    assert other.await_version(Version(0, 1)) == total(1)
    assert figures["publish_workers"] == 1 and figures["publish_lost"] >= 1


@impatient
@pytest.mark.parametrize("transport", ["shared_memory", full("collective")])
def test_a_worker_killed_in_the_middle_of_a_transfer_costs_only_its_own_channel(
    publisher, worker, monkeypatch, transport
):
    """At once through shared memory; gloo may notice only at the deadline of the transfer."""
    victim = worker("w0")
    publisher.publish(Version(0, 0), weights(0))
    victim.await_version(Version(0, 0))

    def ended_after_the_first(*divided):
        first, *others = buckets(*divided)
        yield first
        victim.end()
        yield from others

    monkeypatch.setattr("april.weights.snapshot.buckets", ended_after_the_first)
    began = time.monotonic()
    figures = publisher.publish(Version(0, 1), {"a": torch.full((20_000_000,), 0.5)})
    assert (figures["publish_workers"], figures["publish_lost"], figures["publish_late"]) == (0, 1, 0)
    bound_s = IMPATIENCE.publish_deadline_s if transport == "collective" else IMPATIENCE.transfer_deadline_s / 2
    assert time.monotonic() - began < bound_s
    monkeypatch.undo()
    assert worker("w1").await_version(Version(0, 1)) == 10_000_000


@pytest.mark.parametrize("transport", ["collective", full("shared_memory")])
def test_a_restarted_worker_takes_its_predecessor_s_place(publisher, worker):
    first = worker("w0")
    publisher.publish(Version(0, 0), weights(0))
    first.await_version(Version(0, 0))
    first.end()
    second = worker("w0")
    assert second.await_version(Version(0, 0)) == total(0)
    assert publisher.publish(Version(0, 1), weights(1))["publish_workers"] == 1
    assert second.await_version(Version(0, 1)) == total(1)


@pytest.mark.full
def test_a_worker_without_an_engine_has_no_channel_for_which_the_learner_would_wait(publisher, receive):
    up = [True]
    publisher.publish(Version(0, 0), weights(0))
    receiver = receive(up=lambda: up[0])
    assert take(receiver).version == Version(0, 0)
    up[0] = False
    wait_until(lambda: not publisher._channels)
    assert publisher.publish(Version(0, 1), weights(1))["publish_late"] == 0
    up[0] = True
    assert take(receiver).version == Version(0, 1)


def test_a_worker_that_leaves_tells_the_learner(publisher, caplog):
    caplog.set_level("INFO")
    publisher.publish(Version(0, 0), weights(0))
    receiver = WeightReceiver(publisher.config, "uid", "w0", "cpu")
    receiver.connect(publisher.address)
    assert take(receiver).version == Version(0, 0)
    receiver.close()
    wait_until(lambda: not publisher._channels)
    assert "is lost: its worker has left" in caplog.text


@pytest.mark.parametrize("patience", [WeightsSection(publish_deadline_s=0.1)], ids=["hasty"])
def test_a_late_worker_gets_the_last_version_before_the_learner_ends(publisher, receive):
    publisher.publish(Version(0, 0), weights(0))
    receiver = receive()
    late = take(receiver)
    draining = threading.Thread(target=publisher.drain)
    draining.start()
    draining.join(0.5)
    assert draining.is_alive()
    receiver.loaded(late.version)
    draining.join(PATIENCE_S)
    assert not draining.is_alive()
    assert [channel.acknowledged for channel in publisher._channels.values()] == [late.version]


@collective
@pytest.mark.parametrize("patience", [WeightsSection(publish_deadline_s=5.0, transfer_deadline_s=1.0)], ids=["hasty"])
def test_nobody_waits_for_a_worker_that_puts_its_update_off_and_it_keeps_its_channel(publisher, receive):
    publisher.publish(Version(0, 0), weights(0))
    receiver = receive()
    receiver.loaded(take(receiver).version)
    wait_until(lambda: publisher.publish(Version(0, 0), weights(0))["publish_workers"] == 1)
    receiver.put_off(True)
    figures = publisher.publish(Version(0, 1), weights(1))
    assert (figures["publish_late"], figures["publish_workers"]) == (0, 0)
    [channel] = publisher._channels.values()
    time.sleep(2 * publisher.config.transfer_deadline_s)
    assert publisher.publish(Version(0, 2), weights(2))["publish_lost"] == 0
    assert publisher._channels == {channel.name: channel}
    receiver.put_off(False)
    receiver.loaded(take(receiver).version)
    assert take(receiver).version == Version(0, 2)


@pytest.mark.full
@impatient
def test_a_hung_worker_loses_only_its_own_channel_and_comes_back_when_it_wakes(publisher, worker):
    hung, other = worker("w0", "w1")
    publisher.publish(Version(0, 0), weights(0))
    for each in (hung, other):
        each.await_version(Version(0, 0))
    hung.process.send_signal(signal.SIGSTOP)
    publisher.publish(Version(0, 1), weights(1))
    assert other.await_version(Version(0, 1)) == total(1)
    hung.process.send_signal(signal.SIGCONT)
    publisher.publish(Version(0, 2), weights(2))
    assert [each.await_version(Version(0, 2)) for each in (hung, other)] == [total(2)] * 2


@pytest.mark.full
@impatient
def test_a_worker_that_slept_between_two_publications_gets_a_new_channel(publisher, worker):
    sleeper = worker("w0")
    publisher.publish(Version(0, 0), weights(0))
    sleeper.await_version(Version(0, 0))
    sleeper.process.send_signal(signal.SIGSTOP)
    time.sleep(SILENCE_S + 1.5)
    sleeper.process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    publisher.publish(Version(0, 1), weights(1))
    assert sleeper.await_version(Version(0, 1)) == total(1)


def test_a_publish_without_workers_returns_at_once(publisher):
    assert publisher.publish(Version(0, 0), weights(0))["publish_workers"] == 0


def test_the_canary_comes_with_its_version_and_the_learner_counts_engines_with_wrong_weights(publisher, receive):
    """To one that comes late, too."""
    canary = Canary([3, 1, 2], [-0.5, -1.5], "float32")
    publisher.publish(Version(0, 0), weights(0), canary)
    receiver = receive()
    staged = take(receiver)
    assert staged.canary == canary and staged.digest == publisher._snapshot.checksum
    receiver.refuse("these are others", wrong=True)
    wait_until(lambda: not publisher._channels)
    assert publisher.publish(Version(0, 1), weights(1))["publish_wrong"] == 1
    assert publisher.publish(Version(0, 2), weights(2))["publish_wrong"] == 0


@shared_memory
def test_a_refused_worker_says_so_and_asks_again_only_after_a_while(publisher, receive, monkeypatch, caplog):
    monkeypatch.setattr(SharedMemoryTransport, "_enter", refuse_all)
    publisher.publish(Version(0, 0), weights(0))
    receive()
    wait_until(lambda: "no weights for this worker: elsewhere" in caplog.text)
    time.sleep(1.0)
    assert publisher._count == 1


def refuse_all(*arguments):
    raise OtherMachine("elsewhere")


@pytest.mark.full
@impatient
def test_a_channel_that_has_ended_leaves_no_keys_in_the_store(publisher, worker):
    first = worker("w0")
    publisher.publish(Version(0, 0), weights(0))
    assert first.await_version("0.0") is not None and publisher._store.list_keys()
    first.end()
    wait_until(lambda: not publisher._channels and not publisher._store.list_keys())
