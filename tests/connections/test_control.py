"""Signs of life come from a thread of their own: leases live on while their holder's main loop is busy or stuck."""

import time

import pytest
import zmq

from april import wire
from april.connections.broker import BrokerConnection
from april.processes.pulse import MAIN, Pulse, Watch

RENEW_S = 0.5


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


def hear(router, seconds):
    """Messages that have come until then, with their sessions."""
    heard, deadline = [], time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if router.poll(left * 1000):
            received = wire.decode(router.recv_multipart(copy=False)[1:])
            heard.append((received.session, received.message))
    return heard


def test_a_session_is_bound_and_then_kept_alive_whatever_its_owner_does(router, connection):
    assert hear(router, 0.3) == []
    connection.hold([3, 4], emitted_tokens=7)
    connection.occupy(wire.Slots(2, 1, 0, [4]))
    MAIN.at("a long prefill")
    connection.begin(wire.Welcome(9, "run", 1, 0, 0, [], RENEW_S, ""))
    heard = hear(router, 3.5)
    assert [session for session, _ in heard] == [9] * len(heard) and len(heard) >= 4
    bind, *beats = [message for _, message in heard]
    assert bind == wire.Bind() and {type(beat) for beat in beats} == {wire.Heartbeat}
    assert [3, 4] in [beat.leases for beat in beats] and beats[-1].emitted_tokens == 7
    assert all(beat.slots == wire.Slots(2, 1, 0, [4]) for beat in beats)
    assert {beat.place for beat in beats} == {"a long prefill"} and beats[-1].for_s > beats[0].for_s
    connection.goodbye()
    said = hear(router, 1.5)
    assert said[-1] == (9, wire.Goodbye()), "nothing is said any more"


def test_what_the_broker_sends_over_control_arrives_in_the_owner_s_thread(router, connection):
    connection.begin(wire.Welcome(9, "run", 1, 0, 0, [], RENEW_S, ""))
    control, *_ = router.recv_multipart()
    router.send_multipart([control, *wire.encode(wire.Abort(2, 5), (), 9)])
    received = []
    while not received:
        received = [one.message for one in connection.receive(100)]
    assert received == [wire.Abort(2, 5)]


def test_a_loop_hangs_when_it_gets_nowhere_for_longer_than_stated():
    pulse = Pulse()
    watch = Watch(hung_s=10.0, long_s=100.0, pulse=pulse)

    def looks(seconds):
        """Whether it hangs, looked at every second."""
        return [watch.look(1.0) != "" for _ in range(seconds + 1)][-1]

    assert not looks(200), "a process that has not said where it is may still be starting"
    pulse.at("decoding")
    assert not looks(99) and looks(100), "the first time anywhere may take long"
    pulse.at("decoding")
    assert not looks(9) and looks(10)
    pulse.at("saving", takes_long=True)
    pulse.at("saving", takes_long=True)
    assert not looks(99) and looks(100)


def test_what_always_takes_long_is_given_ten_times_as_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("april.processes.clock.now", lambda: now[0])
    pulse = Pulse()
    watch = Watch(hung_s=10.0, long_s=100.0, pulse=pulse)
    for _ in range(5):
        pulse.at("a micro-batch")
        now[0] += 3.0
    assert pulse.look() == ("a micro-batch", 3.0, 3.0)
    assert not [watch.look(1.0) for _ in range(30)][-1]
    assert "at 'a micro-batch' for 30 s" in watch.look(1.0)
