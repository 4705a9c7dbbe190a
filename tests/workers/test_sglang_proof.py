"""A real SGLang server that holds other weights than it was sent: nothing of it is handed over, it gets them again."""

import pytest

from april.config import WeightsSection
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.workers.engines.base import Request
from april.workers.engines.conformance.driving import V0, V1, V2, VOCABULARY, Stream, drive, join, prompt
from april.workers.engines.conformance.faults import FAULTS
from april.workers.engines.proof import Proof, WrongWeights
from april.workers.engines.sglang.engine import SGLangEngine
from april.workers.engines.sglang.intake import ServerIntake
from april.workers.engines.sglang.lane import ServerLane
from april.workers.engines.sglang.weights import DiskSnapshot
from tests.workers.server_faults import run_until
from tests.workers.test_intake import Receiver
from tests.workers.test_proof import Learner

pytestmark = [pytest.mark.timeout(900), pytest.mark.sglang]


class Faulty(DiskSnapshot):
    """Passes the tensors on, as `fault` makes them of those before and of those that were sent, once."""

    fault, before = None, None

    async def load(self, client, tensors, change, ranks):
        sent, self.fault = self.fault(self.before, dict(tensors)) if self.fault else tensors, None
        await super().load(client, sent, change, ranks)
        self.before = dict(tensors)


@pytest.fixture
def make_intake(sglang_server, tiny_model):
    made = []

    def make(**options):
        options = {"slots": 8, "chunk_tokens": 50, "stream_tokens": 5, "report_s": 1e9} | options
        push = Faulty(tiny_model().folder)
        made.append(SGLangEngine(tiny_model().folder, VOCABULARY, 640, url=sglang_server.url, push=push, **options))
        return ServerIntake(made[-1], Receiver(), Proof()), push

    yield make
    for engine in made:
        engine.cancel_all(range(100))
        engine.close()


@pytest.fixture
def learner(tiny_model):
    return Learner(tiny_model())


def arrive(intake, staged):
    """Whether it was loaded, and the chunks that the engine has handed over until then, all of older versions."""
    intake.receiver.staged.append(staged)
    told, chunks = len(intake.receiver.told), []
    while intake.load() is None:
        if any(why != "forget" for why in intake.receiver.told[told:]):
            return False, chunks
        chunks += intake.engine.step()
    return True, chunks


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_with_other_weights_holds_nothing_and_gets_them_again(make_intake, learner, fault):
    intake, push = make_intake()
    engine, request = intake.engine, Request(1, prompt(), 400, seed=1)
    assert arrive(intake, learner.sends(V0))[0]
    before = drive(engine, [request], tokens=50)[1]
    push.fault = FAULTS[fault]
    loaded, chunks = arrive(intake, learner.sends(V1))
    assert not loaded and engine.version is None and engine.ready and f"version {V1}" in intake.receiver.told[-1]
    assert [engine.step() for _ in range(3)].count([]) >= 2 and engine.live == 1
    loaded, more = arrive(intake, learner.sends(V1))
    stream = join(before, Stream(chunks + more), drive(engine)[1])
    assert loaded and len(stream.tokens) == 400 and set(stream.versions) == {V0, V1}


def test_what_was_sampled_in_between_is_handed_over_only_once_its_weights_are_proven(make_intake, learner):
    """With `retract` the server goes on by itself as soon as it has other weights."""
    intake, push = make_intake(pause="retract", stream_tokens=1, chunk_tokens=1)
    engine = intake.engine
    assert arrive(intake, learner.sends(V0))[0]
    requests = [Request(i, prompt(), 600, seed=i) for i in range(4)]
    chunks = [chunk for stream in drive(engine, requests, tokens=80).values() for chunk in stream.chunks]
    push.fault = FAULTS["all of the version before"]
    loaded, more = arrive(intake, learner.sends(V1))
    more += engine.step()
    assert not loaded and engine.live == 0 and {key for key, _ in engine.failures()} == {0, 1, 2, 3}
    assert {chunk.version for chunk in chunks + more} == {V0}
    assert arrive(intake, learner.sends(V1))[0]
    again = drive(engine, requests, tokens=80)
    assert {version for stream in again.values() for version in stream.versions} == {V1}


def test_a_server_that_never_takes_them_is_the_end_of_its_worker(make_intake, learner):
    intake, push = make_intake()
    assert arrive(intake, learner.sends(V0))[0]
    stuck = push.before
    push.fault = lambda before, sent: stuck
    assert not arrive(intake, learner.sends(V1))[0]
    push.fault = lambda before, sent: stuck
    with pytest.raises(WrongWeights, match=r"version 0\.1"):
        arrive(intake, learner.sends(V1))


def test_ten_clean_versions_raise_no_alarm(make_intake, learner):
    intake, _ = make_intake()
    for _ in range(5):
        assert arrive(intake, learner.sends(V0))[0] and arrive(intake, learner.sends(V1))[0]
    assert intake.proof.failures == 0


def test_what_the_learner_broadcasts_to_the_server_itself_has_to_be_proven_too(make_intake, learner):
    """A snapshot that is wrong on the learner's side comes again, and is as wrong."""
    engine = make_intake()[0].engine
    publisher = WeightPublisher(WeightsSection(publish_deadline_s=0.1), "test", "cpu")
    receiver = WeightReceiver(WeightsSection(), "uid", "w0", "cpu", server=ServerLane(engine), up=lambda: engine.ready)
    intake = ServerIntake(engine, receiver, Proof())
    receiver.connect(publisher.address)
    publisher.publish(V0, learner.weights[V0], learner.sends(V0).canary)
    run_until(lambda: engine.version == V0, engine, intake.load)
    publisher.publish(V1, learner.weights[V0], learner.sends(V1).canary)
    with pytest.raises(WrongWeights, match=r"version 0\.1"):
        run_until(lambda: engine.version == V1, engine, intake.load)
    assert engine.version is None and publisher.publish(V2, learner.weights[V2])["publish_wrong"] >= 1
    receiver.close()
    publisher.close()
