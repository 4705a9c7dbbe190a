"""Heartbeats come from their own thread: leases stay current while their holder's main loop is busy or stuck."""

import time

import pytest
import zmq

from april import wire
from april.util.pulse import MAIN, LoopWatch, Pulse
from april.wire.sockets.broker import BrokerConnection

RENEW_S = 0.2
PATIENCE_S = 60.0


@pytest.fixture
def router(tmp_path):
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/broker")
    yield socket
    socket.close(0)
    context.term()


@pytest.fixture
def connection(tmp_path):
    connection = BrokerConnection(f"ipc://{tmp_path}/broker", "worker", "w", "u")
    yield connection
    connection.close()


def hear(router, enough):
    """(session, message) of each message until `enough(messages)` is true."""
    heard, deadline = [], time.monotonic() + PATIENCE_S
    while not enough([message for _, message in heard]):
        assert time.monotonic() < deadline, heard
        if router.poll(100):
            received = wire.decode(router.recv_multipart(copy=False)[1:])
            heard.append((received.session, received.message))
    return heard


def is_silent(router, seconds):
    return not router.poll(1000 * seconds)


def test_heartbeats_go_on_whatever_the_main_loop_does(router, connection):
    assert is_silent(router, 0.3)
    connection.hold([3, 4], emitted_tokens=7)
    connection.occupy(wire.Slots(2, 1, 0, [4]))
    MAIN.at("a long prefill")
    connection.begin(wire.Welcome(9, "run", 1, 0, 0, [], RENEW_S, ""))
    heard = hear(router, lambda said: len(said) >= 4 and said[-1].lease_ids)
    assert {session for session, _ in heard} == {9}
    bind, *beats = [message for _, message in heard]
    assert bind == wire.Bind() and {type(beat) for beat in beats} == {wire.Heartbeat}
    assert beats[-1].lease_ids == [3, 4] and beats[-1].emitted_tokens == 7
    assert all(beat.slots == wire.Slots(2, 1, 0, [4]) for beat in beats)
    assert {beat.loop_position for beat in beats} == {"a long prefill"}
    assert beats[-1].loop_elapsed_s > beats[0].loop_elapsed_s
    connection.goodbye()
    hear(router, lambda said: said[-1:] == [wire.Goodbye()])
    assert is_silent(router, 3 * RENEW_S), "no heartbeats after the goodbye"


def test_what_the_broker_sends_over_control_arrives_in_the_owner_s_thread(router, connection):
    connection.begin(wire.Welcome(9, "run", 1, 0, 0, [], RENEW_S, ""))
    control, *_ = router.recv_multipart()
    router.send_multipart([control, *wire.encode(wire.Abort(2, 5), (), 9)])
    received = []
    while not received:
        received = [each.message for each in connection.receive(100)]
    assert received == [wire.Abort(2, 5)]


def test_a_loop_hangs_once_it_stays_at_one_position_for_longer_than_allowed():
    pulse = Pulse()
    watch = LoopWatch(hung_s=10.0, long_s=100.0, pulse=pulse)

    def hangs_after(seconds):
        """Whether the loop hangs after so many seconds, checked every second."""
        return [watch.look(1.0) != "" for _ in range(seconds + 1)][-1]

    assert not hangs_after(200), "a process without a mark may still be starting"
    pulse.at("decoding")
    assert not hangs_after(99) and hangs_after(100), "a new position may take long"
    pulse.at("decoding")
    assert not hangs_after(9) and hangs_after(10)
    pulse.at("saving", takes_long=True)
    pulse.at("saving", takes_long=True)
    assert not hangs_after(99) and hangs_after(100)


def test_a_position_may_take_ten_times_its_usual_duration(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("april.util.clock.now", lambda: now[0])
    pulse = Pulse()
    watch = LoopWatch(hung_s=10.0, long_s=100.0, pulse=pulse)
    for _ in range(5):
        pulse.at("a micro-batch")
        now[0] += 3.0
    assert pulse.look() == ("a micro-batch", 3.0, 3.0)
    assert not [watch.look(1.0) for _ in range(30)][-1]
    assert "at 'a micro-batch' for 30 s" in watch.look(1.0)
