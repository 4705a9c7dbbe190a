"""The machines of a learner find each other through the broker, begin anew together, or fail with a clear error."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from april import wire
from april.learner import multi_node
from april.learner.launch import RESTARTS
from april.weights import channel
from april.wire.sockets.broker import BrokerUnreachable
from tests.support.learner import exposed_ranks
from tests.support.learner.exposed_ranks import PLANTED
from tests.support.warm_imports import Popen

PROGRAM = exposed_ranks.__name__
LIMIT_S = 120


class Told:
    """What the broker has told a machine."""

    error = None
    joined = 0
    is_newer = multi_node.BrokerTalk.is_newer

    def __init__(self, address: str, start: int):
        self.told = wire.Rendezvous(address, start)


def machine(node: int) -> SimpleNamespace:
    return SimpleNamespace(node=node, nodes=2, ranks=1, meeting="", module=PROGRAM, program=[])


@pytest.fixture
def address():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    kept = channel.serve_store_at(listener)
    yield f"127.0.0.1:{port}"
    del kept


def test_machines_wait_for_each_other_and_join_the_latest_start(address):
    early, late = Told(address, 1), Told(address, 2)
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(multi_node.join_start, early, machine(0), LIMIT_S)
        joins = pool.submit(multi_node.join_start, late, machine(1), LIMIT_S)
        assert not waits.done() and not joins.done()
        early.told = late.told
        assert waits.result()[0] == joins.result()[0] == address
    assert early.joined == late.joined == 2


@pytest.mark.parametrize(("node", "lacking"), [(0, 1), (1, 0)])
def test_a_machine_does_not_wait_for_ever_for_another(address, node, lacking):
    with pytest.raises(TimeoutError, match=f"machine {lacking} .*not come"):
        multi_node.join_start(Told(address if node == 0 else "", 1), machine(node), 0.5)


def test_ranks_end_when_all_machines_begin_anew_and_a_status_is_passed_on(address, monkeypatch):
    started, popen = [], subprocess.Popen

    def start(command):
        started.append(command)
        return popen([sys.executable, "-c", programs[len(started) - 1]])

    def another_start(seconds):
        broker.told = wire.Rendezvous(address, 2)

    programs = ["import time; time.sleep(1000)", "raise SystemExit(7)"]
    broker, alone = Told(address, 1), machine(0)
    alone.nodes = 1
    monkeypatch.setattr(multi_node.subprocess, "Popen", start)
    monkeypatch.setattr(multi_node.time, "sleep", another_start)
    assert multi_node.run_ranks(broker, alone, LIMIT_S) is None
    assert multi_node.run_ranks(broker, alone, LIMIT_S) == 7
    assert [[word for word in command if "--start" in word] for command in started] == [["--start=1"], ["--start=2"]]


@pytest.mark.parametrize("error", [BrokerUnreachable("it has ended"), ValueError("what it said does not decode")])
def test_ranks_outlive_the_broker_but_no_failed_talk_with_it(address, monkeypatch, error):
    """A broker may end while ranks still write their weights; without its word a machine misses a new start."""
    popen = subprocess.Popen
    program = "import time; time.sleep(1); raise SystemExit(7)"
    monkeypatch.setattr(multi_node.subprocess, "Popen", lambda command: popen([sys.executable, "-c", program]))
    monkeypatch.setattr(multi_node, "join_start", lambda *_: (address, None))
    broker, alone = Told(address, 1), machine(0)
    broker.joined, broker.error = 1, error
    if isinstance(error, BrokerUnreachable):
        assert multi_node.run_ranks(broker, alone, LIMIT_S) == 7
    else:
        with pytest.raises(ValueError, match="decode"):
            multi_node.run_ranks(broker, alone, LIMIT_S)


@pytest.mark.full
def test_an_impostor_that_poses_as_another_machine_s_rank_plants_nothing(address, tmp_path):
    launch = [sys.executable, "-m", "april.learner.launch", "--nnodes=2", "--node=0", f"--store={address}"]
    environment = {key: value for key, value in os.environ.items() if key != RESTARTS}
    ranks = Popen([*launch, "-m", PROGRAM, "late", str(tmp_path)], env=environment | {"OMP_NUM_THREADS": "1"})
    attack = [sys.executable, "-m", PROGRAM, "impostor", str(tmp_path), address.rpartition(":")[2]]
    subprocess.run(attack, timeout=LIMIT_S, stderr=subprocess.DEVNULL)
    assert ranks.wait(LIMIT_S) == 1
    assert not (tmp_path / PLANTED).exists()
