"""The weight check detects an engine with other weights than it was sent before it samples anything."""

import logging

import msgspec
import numpy as np
import pytest
import torch

from april import config as configuration
from april import wire
from april.broker.alarms.engine_gap import EngineGapAlarm
from april.weights.canary import Canary
from april.weights.source import StagedWeights
from april.wire.message import Version
from april.workers.engines import ENGINES
from april.workers.engines.base import EngineError, Request
from april.workers.engines.conformance.harness import V0, V1, V2, drive, join, prompt
from april.workers.engines.conformance.scores import FAULTS, a_step_further
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.engines.weight_loading import AT_ONCE, SUSPECT, WeightCheck, WeightLoader, WrongWeights
from april.workers.worker import Worker
from tests.support.published_weights import TEXT, Learner, Receiver
from tests.support.scripted_connection import Connection


@pytest.fixture
def learner(tiny_model):
    return Learner(tiny_model())


@pytest.fixture
def loader(tiny_model):
    receiver = Receiver()
    return WeightLoader(TorchEngine(tiny_model().folder, slots=4, chunk_tokens=5), receiver, WeightCheck())


def arrive(loader, staged):
    loader.receiver.staged.append(staged)
    return loader.load()


def test_nothing_is_sampled_under_wrong_weights_and_requests_continue_under_right_ones(learner, loader):
    engine, told, request = loader.engine, loader.receiver.reported, Request(1, prompt(), 60, seed=1)
    assert arrive(loader, learner.sends(V0)) > 0
    before = drive(engine, [request], tokens=20)[1]
    assert arrive(loader, learner.sends(V1, learner.weights[V0])) is None
    assert engine.version is None and f"version {V1}" in told[-1] and "2.5e-05 and" in told[-1]
    drawn = engine.generated_tokens
    assert [engine.step() for _ in range(3)] == [[]] * 3 and engine.generated_tokens == drawn and engine.live == 1
    assert arrive(loader, learner.sends(V1)) > 0 and told[-1] == "forget"
    stream = join(before, drive(engine)[1])
    assert stream.versions == [V0] * drawn + [V1] * (60 - drawn)


def test_a_tied_embedding_that_was_not_updated_is_detected(tiny_model):
    """An engine with an untied copy of the output projection, which misses updates of the embedding."""
    model = tiny_model("qwen2")
    tied = {name: tensor.clone() for name, tensor in model.weights().items()}
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"]
    learner = Learner(model)
    learner.weights[V0] = tied
    learner.weights[V1] = a_step_further(tied)
    learner.weights[V1]["lm_head.weight"] = learner.weights[V1]["model.embed_tokens.weight"]
    loader = WeightLoader(TorchEngine(model.folder), Receiver(), WeightCheck())
    assert arrive(loader, learner.sends(V0)) > 0
    forgotten = learner.weights[V1] | {"lm_head.weight": tied["lm_head.weight"]}
    assert arrive(loader, learner.sends(V1, forgotten)) is None and loader.engine.version is None


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_without_the_canary_trained_tokens_of_wrong_weights_raise_the_alarm(learner, tiny_model, fault):
    engine, alarm = TorchEngine(tiny_model().folder), EngineGapAlarm()

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


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_a_tensor_that_the_engine_holds_otherwise_is_named_however_little_it_differs(learner, loader, name):
    """By one value in its last place, which no log-probability shows."""
    load = loader.engine.load_weights
    loader.engine.load_weights = lambda version, tensors: load(version, tensors | {name: nudged(tensors[name])})
    assert arrive(loader, learner.sends(V0)) is None and loader.engine.version is None
    layer = name.removesuffix("up_proj.weight").removesuffix("mlp.")
    assert "holds other values than were sent for " + layer in loader.receiver.reported[-1]
    loader.engine.load_weights = load
    assert arrive(loader, learner.sends(V0)) > 0


def nudged(tensor):
    """The tensor with its first value one step of its type further."""
    other = tensor.clone()
    other.view(-1)[0] = torch.nextafter(other.view(-1)[0], torch.tensor(torch.inf))
    return other


def test_two_consecutive_failed_checks_end_the_worker_and_a_passed_one_resets_the_count(learner, loader):
    old = learner.weights[V0]
    arrive(loader, learner.sends(V0))
    assert arrive(loader, learner.sends(V1, old)) is None
    assert arrive(loader, learner.sends(V1)) > 0
    assert arrive(loader, learner.sends(V2, old)) is None
    with pytest.raises(WrongWeights, match=f"version {V2}"):
        arrive(loader, learner.sends(V2, old))


def test_an_engine_that_fails_to_score_gets_no_samples(learner, loader, monkeypatch):
    def refuse(tokens):
        raise EngineError("not today")

    monkeypatch.setattr(loader.engine, "score", refuse)
    assert arrive(loader, learner.sends(V0)) is None and loader.engine.version is None
    assert loader.receiver.reported[-1].endswith("it does not score the canary: not today")


def test_a_worker_whose_engine_keeps_failing_the_weight_check_leaves_with_a_sentence(config_file, learner, loader):
    config = configuration.load(config_file, ["--reward.where", "scorer"])
    connection = Connection([wire.Renewed([])] * 9)
    loader.receiver.staged += [learner.sends(V0, learner.weights[V2])] * 2
    loader.receiver.connect = lambda address, key: None
    with pytest.raises(WrongWeights, match=r"hold version 0\.0"):
        Worker(config, loader.engine, connection, [loader]).run()
    assert not any(isinstance(message, wire.WorkerCapacity) for message in connection.sent)
    assert isinstance(connection.sent[-1], wire.Goodbye) and len(connection.script) == 8


def test_an_engine_that_cannot_score_is_logged(config_file, caplog):
    config = configuration.load(config_file, ["--worker.engine", "tests.util.test_registries:OwnEngine"])
    with caplog.at_level(logging.WARNING):
        assert ENGINES.find(config.worker.engine).make_weight_check(config) is None
    assert "does not score texts" in caplog.text
    config = configuration.load(config_file, [])
    assert isinstance(ENGINES.find(config.worker.engine).make_weight_check(config), WeightCheck)
    config = configuration.load(config_file, ["--weights.canary", "false"])
    assert ENGINES.find(config.worker.engine).make_weight_check(config) is None


def test_weights_without_a_canary_are_loaded_with_a_warning(learner, loader, caplog):
    staged = learner.sends(V0)
    with caplog.at_level(logging.WARNING):
        assert arrive(loader, StagedWeights(V0, staged.tensors, 0.0)) > 0
    assert "no canary with 0.0" in caplog.text


# --- where rounding is larger than a step: numbers in place of engines ---


class Rounding:
    """A learner and an engine in bfloat16; each rounds the same weights in its own way, always the same. The learner
    has measured what rounding does: at the engine's, noise is 0.6 of it."""

    def __init__(self, noise=0.05, step=0.0):
        self.noise, self.step, self.proof = noise, step, WeightCheck()

    @property
    def rounding(self):
        return self.noise * 2 / np.sqrt(np.pi) / 0.6

    def said(self, who, version):
        chance = np.random.default_rng([who, version])
        exact = self.step * version * np.random.default_rng(7).standard_normal(len(TEXT) - 1)
        return (exact + self.noise * chance.standard_normal(len(TEXT) - 1)).astype(np.float32)

    def canary(self, version):
        return Canary(TEXT.tolist(), self.said(0, version).tolist(), "bfloat16", self.rounding)

    def judge(self, version, held, fault=0.0, dtype="bfloat16", scored=None):
        """`fault`: by how much the engine's log-probabilities are wrong, in the mean, as a multiple of rounding."""
        canary = self.canary(version)
        staged = StagedWeights(Version(0, version), None, 0.0, canary=canary, digest=str(version))
        wrong = fault * self.rounding * np.random.default_rng(5).standard_normal(len(TEXT) - 1) * np.sqrt(np.pi / 2)
        scored = self.said(1, held) if scored is None else scored
        self.proof.judge(staged, canary, scored + wrong.astype(np.float32), dtype)


@pytest.mark.parametrize("noise", [0.05, 0.005, 0.0005])
def test_a_fault_beyond_what_rounding_does_to_this_model_is_found_with_the_first_version(noise):
    run = Rounding(noise)
    with pytest.raises(WrongWeights, match="are rounding"):
        run.judge(0, held=0, fault=1.05 * AT_ONCE)
    run.judge(0, held=0)


def test_a_fault_a_little_beyond_the_band_is_found_within_eight_versions_though_each_alone_passes():
    run, found = Rounding(), None
    for version in range(8):
        try:
            run.judge(version, held=version, fault=1.1 * SUSPECT)
        except WrongWeights as error:
            found = version, str(error)
            break
    assert found and found[0] >= 2 and "suspect" in found[1]


def test_what_is_beyond_the_usual_noise_of_the_engine_is_found():
    run = Rounding()
    for version in range(1, 30):
        run.judge(version, held=version)
        with pytest.raises(WrongWeights, match="are rounding"):
            run.judge(version, held=version, fault=1.6)
        run.judge(version, held=version)


def test_another_text_begins_anew_what_is_compared_between_versions():
    run = Rounding(step=1.0)
    run.judge(0, held=0)
    changed = msgspec.structs.replace(run.canary(1), tokens=TEXT[::-1].tolist())
    staged = StagedWeights(Version(0, 1), None, 0.0, canary=changed, digest="1")
    run.proof.judge(staged, changed, np.array(changed.logprobs, np.float32), "bfloat16")


def test_rounding_that_grows_as_training_moves_the_policy_passes():
    run = Rounding(step=0.02)
    for version in range(60):
        run.noise = 0.002 * 1.05**version
        run.judge(version, held=version)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_missed_update_below_the_rounding_is_detected_by_identical_bits(dtype):
    run = Rounding()
    for version in range(50):
        run.judge(version, held=version, dtype=dtype)
    with pytest.raises(WrongWeights, match="same to the bit"):
        run.judge(50, held=49, dtype=dtype)
    run.judge(50, held=50, dtype=dtype)


def test_a_coarser_engine_may_round_a_small_update_off():
    run = Rounding()
    run.judge(0, held=0, dtype="fp8")
    run.judge(1, held=0, dtype="fp8")


def test_equal_weights_published_under_another_version_pass():
    run = Rounding()
    run.judge(3, held=3)
    canary = run.canary(4)
    same = StagedWeights(Version(0, 4), None, 0.0, canary=canary, digest="3")
    run.proof.judge(same, canary, run.said(1, 3), "bfloat16")


def test_a_standstill_is_detected_once_the_learner_has_moved_beyond_the_rounding():
    """Of an engine in 8 bits, of which the learner has not measured what rounding does. Its scores also vary each time,
    so that identical bits cannot reveal it."""
    run = Rounding(noise=0.005, step=0.005)
    run.judge(0, held=0, dtype="fp8")
    found = []
    for version in range(1, 20):
        moved = run.step * version * np.random.default_rng(7).standard_normal(len(TEXT) - 1)
        standing = run.said(1, version) - moved.astype(np.float32)
        try:
            run.judge(version, held=version, dtype="fp8", scored=standing)
        except WrongWeights as error:
            found.append(str(error))
    assert found and all("of that" in why for why in found)


@pytest.mark.parametrize("step", [0.0, 0.003, 0.05, 0.3])
def test_an_engine_that_follows_the_learner_always_passes(step):
    run = Rounding(step=step)
    for version in range(300):
        run.judge(version, held=version)


def test_scores_that_are_not_finite_fail_the_check(learner, loader):
    staged = learner.sends(V0)
    scores = torch.full((len(TEXT) - 1,), torch.nan).numpy()
    with pytest.raises(WrongWeights):
        loader.weight_check.judge(staged, staged.canary, scores, "float32")
