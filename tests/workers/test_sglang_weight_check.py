"""A real SGLang server with wrong weights: none of its tokens is returned, and it gets the weights again."""

import pytest

from april.config import WeightsSection
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.workers.engines.base import Request
from april.workers.engines.conformance.harness import V0, V1, V2, Stream, drive, join, prompt
from april.workers.engines.conformance.scores import FAULTS
from april.workers.engines.sglang.channel import ServerWeightChannel, ServerWeightLoader
from april.workers.engines.sglang.weights import DiskSnapshot
from april.workers.engines.weight_loading import WeightCheck, WrongWeights
from tests.support.published_weights import Learner, Receiver
from tests.support.server_faults import run_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.sglang]

TOKENS = 600
"""of a response: the server is still at it when weights come, which are made before it begins"""


class Faulty(DiskSnapshot):
    """A weight push that once passes on tensors that `fault` makes from the previous and the sent ones."""

    fault, before = None, None

    async def load(self, client, tensors, change, ranks):
        sent, self.fault = self.fault(self.before, dict(tensors)) if self.fault else tensors, None
        await super().load(client, sent, change, ranks)
        self.before = dict(tensors)


@pytest.fixture
def make_loader(attach_engine, tiny_model):
    def make(**options):
        push = Faulty(tiny_model().folder)
        return ServerWeightLoader(attach_engine(push=push, **options), Receiver(), WeightCheck()), push

    return make


@pytest.fixture
def learner(tiny_model):
    return Learner(tiny_model())


def arrive(loader, staged):
    """(whether the version was loaded, chunks returned until then); asserts that all are of older versions."""
    loader.receiver.staged.append(staged)
    told, chunks = len(loader.receiver.reported), []
    while loader.load() is None:
        if any(why != "forget" for why in loader.receiver.reported[told:]):
            return False, chunks
        chunks += loader.engine.step()
    return True, chunks


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_the_weight_check_has_no_version_and_gets_the_weights_again(make_loader, learner, fault):
    loader, push = make_loader()
    engine, request = loader.engine, Request(1, prompt(), TOKENS, seed=1)
    assert arrive(loader, learner.sends(V0))[0]
    staged, push.fault = learner.sends(V1), FAULTS[fault]
    before = drive(engine, [request], tokens=50)[1]
    loaded, chunks = arrive(loader, staged)
    assert not loaded and engine.version is None and engine.ready and f"version {V1}" in loader.receiver.reported[-1]
    assert [engine.step() for _ in range(3)].count([]) >= 2 and engine.live == 1
    loaded, more = arrive(loader, learner.sends(V1))
    stream = join(before, Stream(chunks + more), drive(engine)[1])
    assert loaded and len(stream.tokens) == TOKENS and set(stream.versions) == {V0, V1}


def test_tokens_are_returned_only_after_their_weights_pass_the_check(make_loader, learner):
    """With `retract` the server resumes by itself as soon as it has the new weights."""
    loader, push = make_loader(pause="retract", stream_tokens=1, chunk_tokens=1)
    engine = loader.engine
    assert arrive(loader, learner.sends(V0))[0]
    requests = [Request(i, prompt(), TOKENS, seed=i) for i in range(4)]
    staged, push.fault = learner.sends(V1), FAULTS["all of the version before"]
    chunks = [chunk for stream in drive(engine, requests, tokens=80).values() for chunk in stream.chunks]
    loaded, more = arrive(loader, staged)
    more += engine.step()
    assert not loaded and engine.live == 0 and {key for key, _ in engine.failures()} == {0, 1, 2, 3}
    assert {chunk.version for chunk in chunks + more} == {V0}
    assert arrive(loader, learner.sends(V1))[0]
    again = drive(engine, requests, tokens=80)
    assert {version for stream in again.values() for version in stream.versions} == {V1}


def test_a_server_that_keeps_failing_the_weight_check_ends_its_worker(make_loader, learner):
    loader, push = make_loader()
    assert arrive(loader, learner.sends(V0))[0]
    stuck = push.before
    push.fault = lambda before, sent: stuck
    assert not arrive(loader, learner.sends(V1))[0]
    push.fault = lambda before, sent: stuck
    with pytest.raises(WrongWeights, match=r"version 0\.1"):
        arrive(loader, learner.sends(V1))


def test_ten_clean_versions_raise_no_alarm(make_loader, learner):
    loader, _ = make_loader()
    for _ in range(5):
        assert arrive(loader, learner.sends(V0))[0] and arrive(loader, learner.sends(V1))[0]
    assert loader.weight_check.failures == 0


def test_weights_broadcast_to_the_server_are_checked_too(make_loader, learner):
    """A snapshot that is wrong on the learner's side is sent again, and is just as wrong."""
    engine = make_loader()[0].engine
    publisher = WeightPublisher(WeightsSection(publish_deadline_s=0.1), "test", "cpu")
    receiver = WeightReceiver(
        WeightsSection(), "uid", "w0", "cpu", server=ServerWeightChannel(engine), up=lambda: engine.ready
    )
    loader = ServerWeightLoader(engine, receiver, WeightCheck())
    receiver.connect(publisher.address)
    publisher.publish(V0, learner.weights[V0], learner.sends(V0).canary)
    run_until(lambda: engine.version == V0, engine, loader.load)
    publisher.publish(V1, learner.weights[V0], learner.sends(V1).canary)
    with pytest.raises(WrongWeights, match=r"version 0\.1"):
        run_until(lambda: engine.version == V1, engine, loader.load)
    assert engine.version is None and publisher.publish(V2, learner.weights[V2])["publish_wrong"] >= 1
    receiver.close()
    publisher.close()
