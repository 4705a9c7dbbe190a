"""Layers that carry a state compute and learn, from packed sequences, what transformers makes of each alone."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    JambaConfig,
    MambaConfig,
    MiniMaxConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from april.learner import exports
from april.learner.batch import TrainingBatch
from april.learner.loading import persistent_buffers
from april.learner.lora import AdaptedLinear, merged_weights
from april.learner.mixers import mixers_in
from april.learner.model import empty_policy, gather_state, load, load_sharded
from april.learner.packing import pack
from april.learner.trainer import Trainer
from tests.support.learner.architectures import EXPERTS, SHAPE, random_model
from tests.support.learner.comparison import equal, same
from tests.support.learner.frozen_weights import assert_computes_as, full_gradients
from tests.support.learner.reference import ReferenceLearner
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import job, make_config, make_sample, near_policy, settings

CPU = torch.device("cpu")
LINEAR = {f"linear_{name}": n for name, n in
          (("num_key_heads", 2), ("num_value_heads", 4), ("key_head_dim", 8), ("value_head_dim", 8))}  # fmt: skip
KINDS = {"layer_types": ["linear_attention", "full_attention"]}
STATES = {
    "state space beside attention": FalconH1Config(
        **SHAPE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8
    ),
    "gated delta with experts": Qwen3NextConfig(
        **SHAPE, **LINEAR, **EXPERTS, **KINDS, shared_expert_intermediate_size=16,
    ),
    "linear attention": MiniMaxConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, block_size=8, **KINDS
    ),
    "a mixer that is passed no keywords": JambaConfig(
        **SHAPE, num_experts=2, mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1,
        use_mamba_kernels=False,
    ),
}  # fmt: skip
STATE = pytest.mark.parametrize("config", STATES.values(), ids=STATES)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def batch_of(folder, rng, *lengths):
    samples = [make_sample(rng, 3, length, float(i % 2)) for i, length in enumerate(lengths)]
    return near_policy(TrainingBatch(0, [samples]), folder, rng)


@STATE
def test_scores_gradients_names_and_export_are_the_model_s_own(config, one_rank, rng, tmp_path):
    folder = random_model(config, tmp_path / "source")
    samples = [make_sample(rng, 3, 5, 1.0), make_sample(rng, 1, 60, 1.0), make_sample(rng, 20, 1, 1.0)]
    reference = ReferenceLearner(folder, settings(make_config(folder, tmp_path / "run")))
    policy = load_sharded(empty_policy(folder, temperature=0.7), folder, CPU)
    assert_computes_as(reference, policy, samples)
    exports.export(policy.lm, gather_state(policy.lm, merged_weights(policy.lm)), folder, tmp_path / "policy")
    assert equal(reference.lm.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict())


RESIDUAL_IN_FP32 = MambaConfig(vocab_size=SHAPE["vocab_size"], hidden_size=32, num_hidden_layers=2, state_size=4)


@pytest.mark.parametrize("config", [RESIDUAL_IN_FP32, STATES["linear attention"]], ids=["residual", "buffers"])
def test_what_a_model_keeps_in_fp32_is_computed_in_bf16(config, one_rank, rng, tmp_path):
    folder = random_model(config, tmp_path)
    exact, micro = load(folder, 1.0), pack([make_sample(rng, 3, n, 1.0) for n in (5, 30)], CPU)
    policy = load_sharded(empty_policy(folder, 1.0, recompute=True), folder, CPU, bf16=True)
    logprobs = policy(micro)[0]
    logprobs.sum().backward()
    torch.testing.assert_close(logprobs, exact(micro)[0], rtol=0, atol=0.1)
    assert equal(dict(persistent_buffers(policy.lm)), dict(persistent_buffers(exact.lm)))


def test_adapters_that_get_no_gradient_are_told_once(one_rank, rng, tmp_path, caplog):
    folder = random_model(RESIDUAL_IN_FP32, tmp_path / "source")
    trainer, batch = Trainer(make_config(folder, tmp_path / "run", lora={"rank": 4}), CPU), batch_of(folder, rng, 5, 9)
    for _ in range(2):
        trainer.step(batch)
    (said,) = (each for each in caplog.messages if "no gradient" in each)
    assert said.startswith("2 adapters ") and "backbone.layers.0.mixer.dt_proj:" in said


@pytest.mark.full
@STATE
def test_two_ranks_that_recompute_agree_with_one_that_does_not(config, one_rank, rng, tmp_path):
    folder = random_model(config, tmp_path / "source")
    batch = batch_of(folder, rng, 5, 30, 9, 2)
    alone = Trainer(make_config(folder, tmp_path / "alone"), CPU)
    expected = alone.step(batch)
    options = {"activation_checkpointing": True, "microbatch_tokens": 40}
    (result,) = run_ranks(2, [job(make_config(folder, tmp_path / "sharded", **options), [batch])], tmp_path / "ranks")
    same(result["gradients"][0], full_gradients(alone.policy.lm))
    assert result["metrics"][0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@STATE
def test_recomputation_sees_the_row_of_its_own_forward_pass(config, rng, tmp_path):
    folder = random_model(config, tmp_path)
    kept, recomputed = load(folder, 1.0), empty_policy(folder, 1.0, recompute=True)
    recomputed.lm.load_state_dict(kept.lm.state_dict(), assign=True)
    rows = [pack([make_sample(rng, 3, n, 1.0) for n in lengths], CPU) for lengths in ((4, 30), (9, 9, 9))]
    for policy in (kept, recomputed):
        losses = [policy(row)[0].sum() for row in rows]  # both forward passes before either backward pass
        (losses[0] + 2 * losses[1]).backward()
    expected = {name: each.grad for name, each in kept.lm.named_parameters()}
    same({name: each.grad for name, each in recomputed.lm.named_parameters()}, expected)


@pytest.mark.full
@pytest.mark.parametrize("learner", [{"compile": True}, {"compile": True, "activation_checkpointing": True}])
def test_compiled_layers_train_as_plain_ones(learner, one_rank, rng, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # no C++ compiler
    folder = random_model(STATES["state space beside attention"], tmp_path / "source")
    plain, compiled = (
        Trainer(make_config(folder, tmp_path / name, **options), CPU)
        for name, options in (("plain", {}), ("compiled", learner))
    )
    batch = batch_of(folder, rng, 5, 30, 9, 2)
    for _ in range(2):
        expected, found = plain.step(batch), compiled.step(batch)
        for name in ("loss", "grad_norm", "entropy"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6)


@STATE
def test_an_adapter_within_a_mixer_learns_as_merged_weights_would(config, one_rank, rng, tmp_path):
    folder = random_model(config, tmp_path / "source")
    trainer = Trainer(make_config(folder, tmp_path / "run", lora={"rank": 4}, lr=1e-2), CPU)
    batch = batch_of(folder, rng, 5, 30, 9, 2)
    for _ in range(2):
        trainer.step(batch)
    layers = trainer.policy.lm.base_model.layers
    assert any(isinstance(each, AdaptedLinear) for mixer in mixers_in(layers) for each in mixer.modules())
    packed = pack([sample for group in batch.groups for sample in group], CPU)
    exports.export(
        trainer.policy.lm,
        gather_state(trainer.policy.lm, merged_weights(trainer.policy.lm)),
        folder,
        tmp_path / "merged",
    )
    with torch.no_grad():
        torch.testing.assert_close(
            trainer.policy(packed)[0], load(tmp_path / "merged", 0.7)(packed)[0], rtol=1e-4, atol=1e-4
        )


def test_mixers_are_found_by_their_structure():
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.taps = nn.Conv1d(4, 4, 3, groups=4, padding=2)

    class Recurrence(nn.Module):
        def forward(self, hidden_states, cache=None):
            return hidden_states.cumsum(1)

    layer = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE)).model.layers[0]
    assert not list(mixers_in(layer))
    layer.mlp.shift, layer.mlp.sums = Convolution(), Recurrence()
    assert [type(mixer).__name__ for mixer in mixers_in(layer)] == ["Convolution", "Recurrence"]
