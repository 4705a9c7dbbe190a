"""A thread that fails is noticed: it ends its part, which is started again, or whoever waits for its work gets the
error, or it is counted and its work begins anew."""

import ast
import asyncio
import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import april
from april.agents.link import BrokerLink
from april.broker.telemetry.sinks import BackgroundSink
from april.config import WeightsSection
from april.learner.multi_node import BrokerTalk
from april.learner.source import BrokerSource
from april.observe.dashboard.folder import Runs
from april.util import lifetime, pulse
from april.util.lifetime import in_background
from april.util.objects import Call
from april.util.pool import ProcessPool
from april.util.pulse import LoopWatch
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.wire.sockets.control import Control
from tests.support.run_processes import wait_until

PACKAGE = Path(april.__file__).parent
ENDS_ITS_PART = "its part"
WAITED_FOR = "a future or a join"
NOTICED = {
    "agents.host:Host.__init__": WAITED_FOR,
    "agents.link:BrokerLink": "test_the_link_of_agents_says_why_it_has_ended",
    "broker.image_preparation:ImagePreparation.__init__": WAITED_FOR,
    "broker.journal.journal:Journal.__init__": WAITED_FOR,
    "broker.telemetry.sinks:BackgroundSink.__init__": "test_whoever_waits_gets_the_error",
    "broker.verification:JournalVerifier.__init__": "broker/test_damaged_journal.py",
    "broker.views.metrics:Exporter.__init__": ENDS_ITS_PART,
    "launch.clusters.broker_pod:answering_probes": ENDS_ITS_PART,
    "launch.rehearsal:Rehearsal._ask_filters": WAITED_FOR,
    "learner.policy.divided:by_threads": WAITED_FOR,
    "learner.multi_node:BrokerTalk": "test_whoever_waits_gets_the_error",
    "util.lifetime:in_background": "test_whoever_waits_gets_the_error",
    "learner.source:BrokerSource.__init__": "test_whoever_waits_gets_the_error",
    "observe.dashboard.folder:Runs.__init__": "test_a_dashboard_goes_on_reading",
    "trainers.adapters.areal:ArealEngine.callback_addr": "its answers are ignored",
    "trainers.rollouts.aio:AsyncRollouts.__init__": WAITED_FOR,
    "trainers.rollouts.prompts:PromptImages.prepare": WAITED_FOR,
    "util.lifetime:PartThread": ENDS_ITS_PART,
    "util.objects:ObjectStore._try": "test_whoever_waits_gets_the_error",
    "util.pool:ProcessPool.__init__": "test_whoever_waits_gets_the_error",
    "util.pulse:LoopWatch": "test_a_watchdog_that_fails_ends_its_process",
    "weights.parts:PartCommands.__init__": ENDS_ITS_PART,
    "weights.parts:PartSender.__init__": ENDS_ITS_PART,
    "weights.parts:PartSender._obey": ENDS_ITS_PART,
    "weights.puller:SnapshotPuller.__init__": ENDS_ITS_PART,
    "weights.publisher:WeightPublisher._start_thread": "test_whatever_a_transport_raises_costs_its_channel_alone",
    "weights.receiver:WeightReceiver.__init__": "test_a_transport_that_raises_anything_ends_its_worker",
    "weights.publisher_socket:PublisherSocket.__init__": ENDS_ITS_PART,
    "weights.snapshot:block_threads": WAITED_FOR,
    "wire.security.access:AccessControl.__init__": ENDS_ITS_PART,
    "wire.sockets.control:Control": "test_whoever_waits_gets_the_error",
    "workers.rewards.code:assertion_failure": WAITED_FOR,
}
"""Where April starts threads -> who notices that one has failed, or the test of it."""


def test_every_place_that_starts_a_thread_says_who_notices_its_failure():
    found = {}
    for path, tree in modules_with_threads():
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for name, kind in starts_of_threads(tree):
            found[f"{module}:{name}"] = kind
    assert found.keys() == NOTICED.keys()
    plain = {place for place, kind in found.items() if kind == "PartThread"}
    assert {place for place, who in NOTICED.items() if who == ENDS_ITS_PART} <= plain | {"util.lifetime:PartThread"}
    assert all(who in globals() for who in NOTICED.values() if who.startswith("test_"))


def test_no_thread_has_a_method_or_attribute_in_place_of_one_of_python_s():
    """`Thread.join` calls `Thread._stop`, for example: with one of ours in its place it would raise."""
    python_s = {*dir(threading.Thread), *vars(threading.Thread())} - {"__init__", "__doc__", "run", "name", "daemon"}
    for path, tree in modules_with_threads():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and dict(starts_of_threads(ast.Module([node], []))).get(node.name):
                methods = {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
                attributes = {each.attr for each in ast.walk(node)
                              if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)}  # fmt: skip
                assert not python_s & (methods | attributes), f"{path}: {node.name}"


KINDS = ("Thread", "PartThread", "ThreadPoolExecutor", "Timer")


def modules_with_threads():
    """(path, syntax tree) of each module in which one of the KINDS is named."""
    texts = ((path, path.read_text()) for path in PACKAGE.rglob("*.py"))
    return [(path, ast.parse(text)) for path, text in texts if any(kind in text for kind in KINDS)]


def starts_of_threads(tree, within=""):
    """(qualified name, kind) of each class that is a thread and each function that makes one."""
    for node in ast.iter_child_nodes(tree):
        name = f"{within}.{node.name}".strip(".") if hasattr(node, "name") and hasattr(node, "body") else within
        words = node.bases if isinstance(node, ast.ClassDef) else [node.func] if isinstance(node, ast.Call) else []
        for word in words:
            kind = ast.unparse(word).rpartition(".")[2]
            if kind in KINDS:
                yield name, kind
        yield from starts_of_threads(node, name)


def fail(*_, **__):
    raise ValueError("a bug")


@pytest.fixture
def ended(monkeypatch):
    """Statuses with which the process would have ended."""
    statuses = []
    monkeypatch.setattr(lifetime, "exit_at_once", statuses.append)
    return statuses


# --- threads that end their part --------------------------------------------------------------------------------------


def test_a_thread_that_its_part_cannot_do_without_ends_the_process_and_says_why():
    program = (
        "import time; from april.util.lifetime import PartThread as P; P('x', lambda: 1 / 0).start(); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "thread x has failed" in done.stderr and "ZeroDivisionError" in done.stderr


def test_a_watchdog_that_fails_ends_its_process(ended, monkeypatch):
    monkeypatch.setattr(pulse, "LOOK_S", 0.0)
    watch = LoopWatch(1.0, 1.0)
    watch.look = fail
    watch.start()
    watch.join(30)
    assert ended == [1]


@pytest.fixture
def channel(monkeypatch):
    """A publisher with a version, and a receiver that has not been connected yet."""
    publisher = WeightPublisher(WeightsSection(host="127.0.0.1", join_deadline_s=2.0), "run", "cpu")
    receiver = WeightReceiver(publisher.config, "uid", "w0", "cpu")
    yield publisher, receiver
    receiver.close()
    publisher.close()


def test_a_transport_that_raises_anything_ends_its_worker(channel, ended):
    publisher, receiver = channel
    receiver.transport = SimpleNamespace(meet=fail, carries_weights=True)
    receiver.connect(publisher.address)
    receiver._thread.join(60)
    assert ended == [1]


def test_whatever_a_transport_raises_costs_its_channel_alone(channel, caplog):
    caplog.set_level("INFO")
    publisher, receiver = channel
    real, publisher._transport = publisher._transport, SimpleNamespace(meet=fail)
    receiver.connect(publisher.address)
    wait_until(lambda: publisher._lost)
    assert "a bug" in caplog.text
    publisher._transport = real
    wait_until(lambda: any(channel.state == "ready" for channel in publisher._channels.values()))


# --- threads whose error reaches whoever waits ------------------------------------------------------------------------


class Pool(ProcessPool):
    _hand_out = fail


class FailingSink(BackgroundSink):
    open = fail


def source_that_fails():
    source = BrokerSource.__new__(BrokerSource)
    connection = SimpleNamespace(hello=lambda **_: None, wake_by=lambda _: None, send=fail, receive=fail)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("april.learner.source.BrokerConnection", lambda *_: connection)
        source.__init__("address", "weights", 1.0)
    return source


def talk_that_fails():
    talk = BrokerTalk.__new__(BrokerTalk)
    super(BrokerTalk, talk).__init__()
    talk.connection, talk.address, talk.joined, talk.error = SimpleNamespace(request=fail), "", 0, None
    talk.run()
    return talk


def control_that_fails():
    control = Control(SimpleNamespace())
    control._receive = fail
    control.run()
    return control


def call_that_fails():
    call = Call(fail)
    call.run()
    return call


def test_whoever_waits_gets_the_error(tmp_path):
    pool, sink = Pool(0), FailingSink(tmp_path)
    pool._thread.join(30)
    sink._thread.join(30)
    for use in (
        lambda: list(control_that_fails().take()),
        lambda: source_that_fails().best(),
        lambda: in_background(fail).result(30),
        pool.poll,
        sink.close,
    ):
        with pytest.raises((ValueError, TypeError)):
            use()
    assert isinstance(talk_that_fails().error, ValueError) and isinstance(call_that_fails().error, ValueError)


def test_the_link_of_agents_says_why_it_has_ended():
    async def failing():
        stopped = asyncio.Event()
        link = BrokerLink.__new__(BrokerLink)
        super(BrokerLink, link).__init__(daemon=True)
        link.connection = SimpleNamespace(hello=fail, close=fail)
        link.listener = SimpleNamespace(stop=lambda why: stopped.set())
        link.loop, link.leases, link.stopping, link.failure = asyncio.get_running_loop(), set(), "", None
        link.images = {}
        with contextlib.suppress(ValueError):
            await asyncio.to_thread(link.run)
        await asyncio.wait_for(stopped.wait(), 30)
        return link.failure

    assert isinstance(asyncio.run(failing()), ValueError)


# --- threads whose work begins anew -----------------------------------------------------------------------------------


def test_a_dashboard_goes_on_reading(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    monkeypatch.setattr("april.observe.dashboard.folder.PAUSE_S", 0.0)
    reads = []

    def read(self):
        reads.append(1)
        return fail()

    monkeypatch.setattr(Runs, "_read_followed", read)
    runs = Runs(str(tmp_path))
    wait_until(lambda: len(reads) > 2)
    runs.close()
