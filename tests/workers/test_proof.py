"""An engine that samples from other weights than it was sent is found before it has sampled anything."""

import logging

import numpy as np
import pytest
import torch

from april import config as configuration
from april import wire
from april.broker.telemetry.engine_gap import EngineGap
from april.weights.canary import Canary, canary_tokens
from april.weights.receiver import Staged
from april.wire.version import Version
from april.workers.engines import ENGINES
from april.workers.engines.base import EngineError, Request
from april.workers.engines.conformance.driving import V0, V1, V2, VOCABULARY, drive, join, prompt
from april.workers.engines.conformance.faults import FAULTS, a_step_further
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.intake import Intake
from april.workers.engines.proof import BANDS, Proof, WrongWeights
from april.workers.worker import Worker
from tests.workers.test_intake import Receiver
from tests.workers.test_worker_aborts import Connection

TEXT = canary_tokens(VOCABULARY)


class Learner:
    """Publishes the versions of a tiny model, each a step further."""

    def __init__(self, model):
        weights = {name: tensor.clone() for name, tensor in model.weights().items() if name != "lm_head.weight"}
        self.model, self.weights = model, {V0: weights}
        for before, version in ((V0, V1), (V1, V2)):
            self.weights[version] = a_step_further(self.weights[before], seed=version.step)

    def sends(self, version, tensors=None):
        """What arrives of a version, with other tensors than its own where they are given."""
        published = self.weights[version]
        logprobs = self.model.logprobs_under(published, TEXT.tolist()).tolist()
        canary = Canary(TEXT.tolist(), logprobs, "float32")
        return Staged(version, tensors or published, 0.0, canary=canary, checksum=version.step)


@pytest.fixture
def learner(tiny_model):
    return Learner(tiny_model())


@pytest.fixture
def intake(tiny_model):
    receiver = Receiver()
    return Intake(TorchEngine(tiny_model().folder, slots=4, chunk_tokens=5), receiver, Proof())


def arrive(intake, staged):
    intake.receiver.staged.append(staged)
    return intake.load()


def test_nothing_is_sampled_under_wrong_weights_and_what_runs_goes_on_under_the_right_ones(learner, intake):
    engine, told, request = intake.engine, intake.receiver.told, Request(1, prompt(), 60, seed=1)
    assert arrive(intake, learner.sends(V0)) > 0
    before = drive(engine, [request], tokens=20)[1]
    assert arrive(intake, learner.sends(V1, learner.weights[V0])) is None
    assert engine.version is None and f"version {V1}" in told[-1] and "0.001 are rounding" in told[-1]
    drawn = engine.generated_tokens
    assert [engine.step() for _ in range(3)] == [[]] * 3 and engine.generated_tokens == drawn and engine.live == 1
    assert arrive(intake, learner.sends(V1)) > 0 and told[-1] == "forget"
    stream = join(before, drive(engine)[1])
    assert stream.versions == [V0] * drawn + [V1] * (60 - drawn)


def test_a_tied_embedding_that_is_forgotten_is_found(tiny_model):
    """An engine with an output projection of its own, to which nobody brings the new embedding."""
    model = tiny_model("qwen2")
    tied = {name: tensor.clone() for name, tensor in model.weights().items()}
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"]
    learner = Learner(model)
    learner.weights[V0] = tied
    learner.weights[V1] = a_step_further(tied)
    learner.weights[V1]["lm_head.weight"] = learner.weights[V1]["model.embed_tokens.weight"]
    intake = Intake(TorchEngine(model.folder), Receiver(), Proof())
    assert arrive(intake, learner.sends(V0)) > 0
    forgotten = learner.weights[V1] | {"lm_head.weight": tied["lm_head.weight"]}
    assert arrive(intake, learner.sends(V1, forgotten)) is None and intake.engine.version is None


@pytest.mark.parametrize("fault", FAULTS)
def test_without_the_canary_what_such_an_engine_sampled_raises_the_alarm_of_the_trained_tokens(
    learner, tiny_model, fault
):
    engine, alarm = TorchEngine(tiny_model().folder), EngineGap()

    def sampled_under(version, tensors):
        engine.load_weights(version, tensors)
        streams = drive(engine, [Request(i, prompt(seed=i), 60, seed=i) for i in range(4)])
        gaps = np.abs(np.concatenate([gaps_of(streams[i], prompt(seed=i).tolist(), version) for i in range(4)]))
        figures = {"age": 0, "tokens": len(gaps), "mean": gaps.mean(), "largest": gaps.max()}
        return alarm.look({"engine_gaps": {"worker-0": figures}})

    def gaps_of(stream, asked, version):
        logprobs = learner.model.logprobs_under(learner.weights[version], asked + stream.tokens)
        return np.array(stream.logprobs) - logprobs.numpy()[len(asked) - 1 :]

    assert sampled_under(V0, learner.weights[V0]) == ""
    assert sampled_under(V1, learner.weights[V1]) == ""
    assert "worker-0" in sampled_under(V2, FAULTS[fault](learner.weights[V1], learner.weights[V2]))


def test_weights_that_are_wrong_twice_in_a_row_are_the_end_and_right_ones_in_between_are_not(learner, intake):
    old = learner.weights[V0]
    arrive(intake, learner.sends(V0))
    assert arrive(intake, learner.sends(V1, old)) is None
    assert arrive(intake, learner.sends(V1)) > 0
    assert arrive(intake, learner.sends(V2, old)) is None
    with pytest.raises(WrongWeights, match=f"version {V2}"):
        arrive(intake, learner.sends(V2, old))


def test_an_engine_that_says_it_scores_and_does_not_gets_nothing(learner, intake, monkeypatch):
    def refuse(tokens):
        raise EngineError("not today")

    monkeypatch.setattr(intake.engine, "score", refuse)
    assert arrive(intake, learner.sends(V0)) is None and intake.engine.version is None
    assert intake.receiver.told[-1].endswith("it does not score the canary: not today")


def test_a_worker_whose_engine_does_not_come_to_hold_its_weights_leaves_with_a_sentence(config_file, learner, intake):
    config = configuration.load(config_file, ["--reward.where", "scorer"])
    connection = Connection([wire.Renewed([])] * 9)
    intake.receiver.staged += [learner.sends(V0, learner.weights[V2])] * 2
    intake.receiver.connect = lambda address, key: None
    with pytest.raises(WrongWeights, match=r"is not seen to hold version 0\.0"):
        Worker(config, intake.engine, connection, [intake]).run()
    assert not any(isinstance(message, wire.Holding) for message in connection.sent)
    assert isinstance(connection.sent[-1], wire.Goodbye) and len(connection.script) == 8


def test_an_engine_that_cannot_score_is_stated(config_file, caplog):
    config = configuration.load(config_file, ["--worker.engine", "tests.test_registries:OwnEngine"])
    with caplog.at_level(logging.WARNING):
        assert ENGINES.find(config.worker.engine).make_proof(config) is None
    assert "does not score texts: that it samples from the weights it is sent is not proven" in caplog.text
    config = configuration.load(config_file, [])
    assert isinstance(ENGINES.find(config.worker.engine).make_proof(config), Proof)
    config = configuration.load(config_file, ["--weights.canary", "false"])
    assert ENGINES.find(config.worker.engine).make_proof(config) is None


def test_weights_without_a_canary_are_taken_and_that_is_stated(learner, intake, caplog):
    staged = learner.sends(V0)
    with caplog.at_level(logging.WARNING):
        assert arrive(intake, Staged(V0, staged.tensors, 0.0)) > 0
    assert "has published no canary with 0.0: nothing is proven" in caplog.text


# --- where rounding is larger than a step: numbers in place of engines ---


class Rounding:
    """A learner and an engine in bfloat16: each rounds the same weights its own way, and the same way every time."""

    def __init__(self, noise=0.05, step=0.0):
        self.noise, self.step, self.proof = noise, step, Proof()

    def said(self, who, version):
        chance = np.random.default_rng([who, version])
        exact = self.step * version * np.random.default_rng(7).standard_normal(len(TEXT) - 1)
        return (exact + self.noise * chance.standard_normal(len(TEXT) - 1)).astype(np.float32)

    def judge(self, version, held):
        canary = Canary(TEXT.tolist(), self.said(0, version).tolist(), "bfloat16")
        staged = Staged(Version(0, version), None, 0.0, canary=canary, checksum=version)
        self.proof.judge(staged, canary, self.said(1, held), "bfloat16")


def test_an_update_that_is_smaller_than_the_rounding_is_missed_by_no_bit():
    run = Rounding()
    for version in range(50):
        run.judge(version, held=version)
    with pytest.raises(WrongWeights, match="the same to the bit"):
        run.judge(50, held=49)
    run.judge(50, held=50)


def test_a_version_that_is_published_again_under_another_name_is_no_standstill():
    run = Rounding()
    run.judge(3, held=3)
    canary = Canary(TEXT.tolist(), run.said(0, 4).tolist(), "bfloat16")
    run.proof.judge(Staged(Version(0, 4), None, 0.0, canary=canary, checksum=3), canary, run.said(1, 3), "bfloat16")


def test_an_engine_that_stands_still_is_found_once_the_learner_has_left_the_rounding():
    """It also says something else each time, so that no bit tells."""
    run = Rounding(noise=0.02, step=0.02)
    run.judge(0, held=0)
    found = []
    for version in range(1, 40):
        canary = Canary(TEXT.tolist(), run.said(0, version).tolist(), "bfloat16")
        standing = run.said(1, version) - run.step * version * np.random.default_rng(7).standard_normal(len(TEXT) - 1)
        try:
            run.proof.judge(Staged(Version(0, version), None, 0.0, canary=canary), canary, standing, "bfloat16")
        except WrongWeights as error:
            found.append((version, str(error)))
    version, why = found[0]
    assert "of that" in why and BANDS["bfloat16"].mean > np.abs(run.said(0, version) - run.said(1, 0)).mean()


@pytest.mark.parametrize("step", [0.0, 0.003, 0.05, 0.3])
def test_an_engine_that_moves_along_is_never_accused(step):
    run = Rounding(step=step)
    for version in range(300):
        run.judge(version, held=version)


def test_what_is_not_a_number_is_wrong(learner, intake):
    staged = learner.sends(V0)
    scores = torch.full((len(TEXT) - 1,), torch.nan).numpy()
    with pytest.raises(WrongWeights):
        intake.proof.judge(staged, staged.canary, scores, "float32")
