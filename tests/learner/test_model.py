"""Other architectures than the quickstart's: exact where they are supported, refused where they are not."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from april.learner import exports
from april.learner.batch import TrainingBatch
from april.learner.loading import ModelError
from april.learner.lora import merged_weights
from april.learner.model import empty_policy, gather_state, load, load_sharded
from april.learner.packing import pack
from april.learner.trainer import Trainer
from tests.support.learner.architectures import ARCHITECTURES, EXPERTS, SHAPE, random_model
from tests.support.learner.comparison import equal, same
from tests.support.learner.frozen_weights import assert_computes_as, full_gradients
from tests.support.learner.reference import ReferenceLearner
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import VOCAB, job, make_config, make_sample, near_policy, settings
from tests.support.marks import full

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "config",
    [*ARCHITECTURES.args[1], GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)],
    ids=lambda config: config.model_type,
)
def test_scores_gradients_names_and_export_are_the_model_s_own(config, one_rank, tmp_path):
    folder = random_model(config, tmp_path / "source")
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, 3, 5, 1.0), make_sample(rng, 1, 60, 1.0)]
    reference = ReferenceLearner(folder, settings(make_config(folder, tmp_path / "run")))
    policy = load_sharded(empty_policy(folder, temperature=0.7), folder, CPU)
    assert_computes_as(reference, policy, samples)
    state = gather_state(policy.lm, merged_weights(policy.lm))
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert state.keys() == set(weights.keys())
    exports.export(policy.lm, state, folder, tmp_path / "policy")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    assert equal(reference.lm.state_dict(), exported)


@pytest.mark.parametrize(
    ("width", "bf16", "product"),
    [
        (16, False, "grouped_mm"),
        (12, False, "grouped_mm"),
        (6, False, "eager"),
        (16, True, "grouped_mm"),
        (12, True, "eager"),
    ],
)
def test_experts_with_unaligned_sizes_are_computed_one_by_one(one_rank, tmp_path, width, bf16, product):
    folder = random_model(Qwen3MoeConfig(**SHAPE, **EXPERTS | {"moe_intermediate_size": width}), tmp_path / "source")
    policy = load_sharded(empty_policy(folder, temperature=0.7), folder, CPU, bf16)
    assert policy.lm.config._experts_implementation == product
    logprobs, _ = policy(pack([make_sample(np.random.default_rng(0), 3, 5, 1.0)], CPU))
    logprobs.sum().backward()


@ARCHITECTURES
@pytest.mark.parametrize(
    "learner", [full({}), {"compute": "bf16", "activation_checkpointing": True}], ids=["fp32", "bf16"]
)
def test_steps_on_a_batch_lower_its_loss_and_move_fp32_weights(config, learner, one_rank, tmp_path):
    folder = random_model(config, tmp_path / "source")
    trainer = Trainer(make_config(folder, tmp_path / "run", lr=3e-3, grad_clip=1.0, **learner), CPU)
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, 3, length, reward) for length, reward in [(5, 1.0), (30, 0.0), (9, 1.0), (2, 0.0)]]
    batch = near_policy(TrainingBatch(0, [samples]), folder, rng)
    before = trainer.weights()
    losses = [trainer.step(batch)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    after = trainer.weights()
    assert all(value.dtype == torch.float32 for value in after.values())
    assert not equal(before, after)


@pytest.mark.full
def test_two_ranks_that_recompute_experts_agree_with_one_that_keeps_them(one_rank, tmp_path):
    folder = random_model(Qwen3MoeConfig(**SHAPE, **EXPERTS), tmp_path / "source")
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, 3, length, reward) for length, reward in [(5, 1.0), (30, 0.0), (9, 1.0), (2, 0.0)]]
    batch = near_policy(TrainingBatch(0, [samples]), folder, rng)
    alone = Trainer(make_config(folder, tmp_path / "alone"), CPU)
    expected = alone.step(batch)
    sharded = {"activation_checkpointing": True, "microbatch_tokens": 40}
    configs = [make_config(folder, tmp_path / compute, compute=compute, **sharded) for compute in ("fp32", "bf16")]
    exact, rounded = run_ranks(2, [job(config, [batch]) for config in configs], tmp_path / "ranks")
    same(exact["gradients"][0], full_gradients(alone.policy.lm))
    for result, tolerance in ((exact, 1e-5), (rounded, 0.05)):
        assert result["metrics"][0]["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert result["metrics"][0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "'dynamic'"),
        (GPT2Config(vocab_size=VOCAB, n_embd=32, n_head=4, n_layer=1), "no list `layers`"),
    ],
    ids=["positions", "no layers"],
)
def test_models_that_would_be_scored_wrongly_are_refused(config, reason, tmp_path):
    with pytest.raises(ModelError, match=reason):
        load(random_model(config, tmp_path), temperature=1.0)


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SHAPE, attention_dropout=0.5), MixtralConfig(**SHAPE, num_local_experts=4, router_jitter_noise=0.5)],
    ids=lambda config: config.model_type,
)
def test_nothing_is_random_in_training_whatever_its_name(config, tmp_path):
    policy = load(random_model(config, tmp_path), temperature=1.0).train()
    packed = pack([make_sample(np.random.default_rng(0), 3, 5, 1.0)], CPU)
    (first, _), (second, _) = policy(packed), policy(packed)
    assert torch.equal(first, second)


@pytest.mark.full
def test_compiled_layers_train_as_plain_ones_and_are_not_compiled_for_each_batch(one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # no C++ compiler
    folder = random_model(Qwen3Config(**SHAPE), tmp_path / "source")
    rng = np.random.default_rng(0)
    plain, compiled = (
        Trainer(make_config(folder, tmp_path / f"run-{compile}", lr=1e-3, compile=compile), CPU)
        for compile in (False, True)
    )
    counted = []
    for lengths in [(5, 9), (30, 4, 2), (7,), (1, 2, 3, 4), (6, 6, 6, 6, 6)]:
        samples = [make_sample(rng, 3, length, float(i % 2)) for i, length in enumerate((*lengths, 3))]
        batch = near_policy(TrainingBatch(0, [samples]), folder, rng)
        expected, found = plain.step(batch), compiled.step(batch)
        for name in ("loss", "grad_norm", "entropy"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6)
        counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counted[0] and counted[-1] == counted[1]
