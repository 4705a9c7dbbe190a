"""Several servers behind one worker: the learner sends them one copy, whoever passes it on, and a lost one costs that
worker a new channel and nobody else anything. The servers here are threads with gloo groups of their own."""

import asyncio
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from april.config import WeightsSection
from april.util import clock
from april.weights.channel import connect_to_store
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.wire.message import Version
from april.wire.sockets.base import own_address
from april.workers.engines.sglang import weights as server_weights
from april.workers.engines.sglang.channel import ServerWeightChannel, ServerWeightLoader
from april.workers.engines.sglang.client import ServerGone
from april.workers.engines.sglang.shared_weights import ServerBarrier, SharedWeights

V0, V1, V2 = (Version(0, step) for step in range(3))
SERVERS = 3
PATIENCE_S = 60.0


def tensors_of(version):
    return {"layer": torch.full((1000,), float(1 + version.step))}


class Server:
    """Stands in for a server and its engine: it has the calls that move weights, and holds `values`."""

    dtype, kv_tokens = "float32", None

    def __init__(self, loop):
        self.begin, self.ready, self.version, self.values = loop.create_task, True, None, None
        self.info, self.groups, self.before_start, self.is_slow = {"device": "cpu"}, {}, lambda: None, False

    def make_client(self):
        async def close():
            pass

        return SimpleNamespace(call=self.call, close=close)

    def suspect(self, why):
        raise AssertionError(why)

    async def call(self, path, body, deadline_s=10.0):
        if path == "/begin_weight_update":
            self.before_start()
        if not self.ready:
            raise ServerGone("the server is gone")
        if path == "/init_weights_update_group":
            await asyncio.to_thread(self.join, body)
        elif path == "/destroy_weights_update_group":
            self.groups.pop(body["group_name"], None)
        elif path == "/update_weights_from_distributed":
            await asyncio.to_thread(self.receive, body)

    def join(self, body):
        store, name = connect_to_store(body["master_address"], body["master_port"], PATIENCE_S), body["group_name"]
        scoped = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=PATIENCE_S)
        address = own_address(body["master_address"], body["master_port"])
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        self.groups[name] = dist.ProcessGroupGloo(scoped, body["rank_offset"], body["world_size"], options)

    def receive(self, body):
        options, data = dist.BroadcastOptions(), torch.empty(4 * body["shapes"][0][0], dtype=torch.uint8)
        options.rootRank = 0
        self.groups[body["group_name"]].broadcast([data], options).wait()
        self.values = data.view(torch.float32)

    async def update_from_broadcast(self, version, manifest, post, verify, meet):
        try:
            await server_weights.receive_broadcast(self.make_client(), manifest, post, meet, {})
        except (ServerGone, server_weights.HalfLoaded) as error:
            raise server_weights.EngineError(str(error)) from None
        self.version = version

    async def update_weights(self, version, tensors, verify):
        while self.is_slow:
            await asyncio.sleep(0.005)
        self.values, self.version = tensors["layer"].clone(), version

    def die(self):
        self.ready, self.version, self.groups = False, None, {}


class Worker:
    """A worker whose servers receive in one group (`joins`), or get what the worker has received."""

    def __init__(self, name, address, joins, servers=SERVERS):
        self.loop = asyncio.new_event_loop()
        self.servers = [Server(self.loop) for _ in range(servers)]
        group = ServerWeightChannel(*self.servers)
        section, server = WeightsSection(), group if joins else None
        self.source = WeightReceiver(section, name, name, "cpu", server=server, up=group.up)
        ups = [lambda each=each: each.ready for each in self.servers]
        shared = SharedWeights(self.source, ups, PATIENCE_S, (lambda: group.members) if joins else None)
        self.loaders = [ServerWeightLoader(*each) for each in zip(self.servers, shared.shares, strict=True)]
        self.source.connect(address)

    def turn(self):
        for loader in self.loaders:
            loader.load()
        self.loop.run_until_complete(asyncio.sleep(0.005))

    def all_hold(self, version):
        up = [server for server in self.servers if server.ready]
        expected = tensors_of(version)["layer"]
        return all(each.version == version and torch.equal(each.values, expected) for each in up)

    def close(self):
        self.source.close()
        self.loop.close()


@pytest.fixture
def run():
    """(publisher, begin, publish, until): `begin(name, joins)` starts a worker and waits for its channel,
    `publish(version)` returns the figures, `until(condition)` gives all workers their turns until it holds."""
    section = WeightsSection(publish_deadline_s=PATIENCE_S, transfer_deadline_s=PATIENCE_S)
    publisher, workers = WeightPublisher(section, "test", "cpu"), []

    def until(condition):
        deadline = clock.now() + PATIENCE_S
        while not condition():
            assert clock.now() < deadline, "it never came to that"
            for worker in workers:
                worker.turn()

    def begin(name, joins):
        workers.append(Worker(name, publisher.address, joins))
        until(lambda: sum(each.state == "ready" for each in list(publisher._channels.values())) == len(workers))
        return workers[-1]

    def publish(version):
        figures = {}
        thread = threading.Thread(target=lambda: figures.update(publisher.publish(version, tensors_of(version))))
        thread.start()
        until(lambda: not thread.is_alive())
        return figures

    yield SimpleNamespace(publisher=publisher, begin=begin, publish=publish, until=until)
    for worker in workers:
        worker.close()
    publisher.close()


@pytest.mark.parametrize(("joins", "copies"), [(False, 1), (True, 2)])
def test_the_servers_of_a_worker_have_one_channel_and_all_hold_what_it_carries(run, joins, copies):
    """gloo's broadcast to three others leaves its root twice: once for each doubling of the group."""
    worker = run.begin("w0", joins)
    for version in (V0, V1):
        figures = run.publish(version)
        assert worker.all_hold(version) and figures["publish_workers"] == 1
        assert figures["publish_sent_bytes"] == copies * figures["publish_bytes"]


def test_the_learner_waits_until_all_servers_hold_a_version(run):
    worker = run.begin("w0", joins=False)
    slow = worker.servers[0]
    slow.is_slow = True
    threading.Timer(1.0, lambda: setattr(slow, "is_slow", False)).start()
    assert run.publish(V0)["publish_late"] == 0
    assert slow.version == V0, "the publication has ended, and not before the last server"


def test_a_server_lost_before_a_broadcast_costs_its_worker_a_new_channel_and_others_nothing(run):
    """The others of its group have not begun, and go on with what they have. Back again, it is in the next channel."""
    hurt, other = run.begin("w0", joins=True), run.begin("w1", joins=True)
    run.publish(V0)
    (kept, lost, _), begun = hurt.servers, []
    kept.before_start = lambda: begun.append(len(hurt.source.server.members))
    hurt.loaders[1].start_load = lambda staged: lost.begin(die_before(lost, staged))
    figures = run.publish(V1)
    assert (figures["publish_workers"], figures["publish_lost"]) == (1, 1) and other.all_hold(V1)
    assert kept.version == V0 and begun == []
    run.until(lambda: hurt.all_hold(V1))
    assert begun == [SERVERS - 1]
    del hurt.loaders[1].start_load
    lost.ready = True
    run.until(lambda: lost.version == V1 and hurt.all_hold(V1))
    assert begun[-1] == SERVERS
    assert run.publish(V2)["publish_workers"] == 2 and hurt.all_hold(V2) and other.all_hold(V2)


def test_a_server_whose_update_is_cancelled_while_it_waits_is_not_counted():
    async def meet():
        barrier = ServerBarrier(2, PATIENCE_S, lambda: None)
        cancelled = asyncio.ensure_future(barrier.meet())
        await asyncio.sleep(0)
        cancelled.cancel()
        first = asyncio.ensure_future(barrier.meet())
        await asyncio.sleep(0)
        assert not first.done()
        await asyncio.gather(first, barrier.meet())

    asyncio.run(meet())


async def die_before(server, staged):
    server.die()
    raise server_weights.EngineError("the server is gone")


def test_a_server_that_is_lost_and_comes_back_gets_the_weights_alone(run):
    """Where the worker passes weights on, those of its servers that hold them load nothing again."""
    worker = run.begin("w0", joins=False)
    run.publish(V0)
    lost, kept = worker.servers[0], worker.servers[1]
    kept.values = marked = kept.values.clone()
    lost.die()
    worker.turn()
    lost.ready = True
    run.until(lambda: lost.version == V0)
    assert kept.values is marked and worker.all_hold(V0)
    assert run.publish(V1)["publish_workers"] == 1 and worker.all_hold(V1)
