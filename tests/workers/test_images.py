"""A worker fetches the images of its samples once, and generates when all are here."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from april import config as configuration
from april import wire
from april.workers.engines import ENGINES
from april.workers.images import SampleImages
from april.workers.worker import Worker
from tests.support.scripted_connection import Connection, Engine, grant

RED, BLUE = "0" * 64, "1" * 64


def images(**found):
    """The broker's answer with these images, by name without its zeros and ones."""
    names = {"red": RED, "blue": BLUE}
    packed = [wire.pack(np.frombuffer(png, "u1")) for png in found.values()]
    return SimpleNamespace(message=wire.Images([names[name] for name in found]), packed=packed)


class Recorder:
    def __init__(self):
        self.asked = []

    def send(self, message):
        self.asked.append(message.names)


def test_an_image_is_asked_for_once_and_a_sample_has_its_images_in_the_order_of_its_prompt():
    broker = Recorder()
    held = SampleImages(broker)
    assert held.of(1, [RED]) is None and held.of(2, [BLUE, RED]) is None
    assert held.take(images(red=b"red")) == ([1], [])
    assert broker.asked == [[RED], [BLUE]]
    assert held.take(images(blue=b"blue")) == ([2], [])
    assert held.of(2, [BLUE, RED]) == (b"blue", b"red") and held.of(3, [RED]) == (b"red",)
    assert len(broker.asked) == 2 and held.of(4, []) == ()


def test_what_a_broker_has_not_answered_is_asked_for_again_in_a_new_session():
    broker = Recorder()
    held = SampleImages(broker)
    held.of(1, [RED])
    held.ask_again()
    assert broker.asked == [[RED], [RED]]


def test_an_image_that_the_broker_cannot_read_fails_its_samples_only():
    held = SampleImages(Recorder())
    held.of(1, [RED])
    held.of(2, [RED, BLUE])
    assert held.take(images(red=b"", blue=b"blue")) == ([], [1, 2])
    assert held.of(3, [BLUE]) == (b"blue",)


def test_the_images_used_longest_ago_make_room_but_none_that_is_waited_for(monkeypatch):
    monkeypatch.setattr("april.workers.images.HELD_BYTES", 4)
    broker = Recorder()
    held = SampleImages(broker)
    held.of(1, [RED, BLUE])
    assert held.take(images(red=b"red")) == ([], [])
    assert held.take(images(blue=b"blue")) == ([1], [])
    assert held.of(1, [RED, BLUE]) == (b"red", b"blue")
    held.of(2, ["2" * 64])
    answer = SimpleNamespace(message=wire.Images(["2" * 64]), packed=[wire.pack(np.frombuffer(b"two", "u1"))])
    assert held.take(answer) == ([2], [])
    assert held.of(3, [RED]) is None


class SeeingEngine(Engine):
    def __init__(self):
        self.requests = []

    def submit(self, request):
        self.requests.append(request)


@pytest.fixture
def work(config_file, monkeypatch):
    """work(takes_images, *script) -> (requests of the engine, what the worker sends)."""

    def run(takes_images, *script):
        config = configuration.load(config_file, ["--reward.where", "scorer"])
        monkeypatch.setattr(ENGINES.find(config.worker.engine), "takes_images", takes_images)
        connection, engine = Connection(script), SeeingEngine()
        worker = Worker(config, engine, connection, [])
        worker.run()
        return engine.requests, connection.sent

    return run


def granted(lease):
    grants = grant(lease)
    return wire.Grants([msgspec.structs.replace(grants.tasks[0], images=[RED])], grants.grants)


def test_a_sample_with_images_is_submitted_with_them(work, monkeypatch):
    answer = images(red=b"red")
    receive = Connection.receive

    def with_arrays(self, timeout_ms):
        [received] = receive(self, timeout_ms)
        return [received if not isinstance(received.message, wire.Images) else answer]

    monkeypatch.setattr(Connection, "receive", with_arrays)
    requests, sent = work(True, granted(1), granted(2), answer.message)
    assert [(request.id, request.images) for request in requests] == [(1, (b"red",)), (2, (b"red",))]
    assert [message.names for message in sent if isinstance(message, wire.FetchImages)] == [[RED]]


def test_images_of_the_response_follow_those_of_the_prompt_and_say_where_they_may_begin(work, monkeypatch):
    answer = images(red=b"red", blue=b"blue")
    receive = Connection.receive

    def with_arrays(self, timeout_ms):
        [received] = receive(self, timeout_ms)
        return [received if not isinstance(received.message, wire.Images) else answer]

    monkeypatch.setattr(Connection, "receive", with_arrays)
    of_agent = granted(1)
    of_agent.grants[0] = msgspec.structs.replace(of_agent.grants[0], shown_images=[(BLUE, 2), (RED, 7)])
    [request], sent = work(True, of_agent, answer.message)
    assert request.images == (b"red", b"blue", b"red") and request.image_starts == (0, 3 + 2, 3 + 7)
    assert [message.names for message in sent if isinstance(message, wire.FetchImages)] == [[RED, BLUE]]


def test_an_engine_without_eyes_gives_the_sample_back_with_a_sentence(work):
    requests, sent = work(False, granted(1))
    [closing] = [each for message in sent if isinstance(message, wire.Report) for each in message.closings]
    assert requests == [] and closing.cause == "generation_failed" and "takes no images" in closing.error
