"""Ranks that share rows compute what one rank computes alone, hold a part of it, and refuse what they cannot share."""

import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from april.learner.context import check_sharing
from april.learner.loading import ModelError
from april.learner.model import empty_policy, load
from april.learner.policy.divided import by_threads, objection_to_division
from tests.support.learner.comparison import equal, same
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import VOCAB, cut_batch, far_batch, job, make_config, told_batch, uneven_batch

pytestmark = pytest.mark.xdist_group("context")
CASES = {
    "a token or more than fits": ({"microbatch_tokens": 1, "grad_clip": 0.05}, {}),
    "recomputed activations": ({"microbatch_tokens": 20, "activation_checkpointing": True}, {}),
    "KL, entropy, adapter": ({}, {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}, "lora": {"rank": 4}}),
    "critic": ({"microbatch_tokens": 40}, {"algorithm": {"advantage": "gae"}}),
    "corrections of a batch": ({"minibatches": 2}, {"algorithm": {"loss": "gspo", "corrections": ["m2po"]}}),
    "supports": ({}, {}),
    "taught": ({"microbatch_tokens": 20}, {"algorithm": {"divergence": "reverse_kl"}}),
    "top k": ({"microbatch_tokens": 20}, {"algorithm": {"divergence": "forward_kl"}, "top_k": 3}),
    "gradient norms": ({}, {"algorithm": {"advantage": "opob"}}),
}
"""Keys of [learner], and further sections."""


def batches_of(case, policy):
    if case == "supports":
        return [cut_batch(policy)]
    if case == "top k":
        return [told_batch(uneven_batch(step, policy), 3) for step in range(2)]
    return [far_batch(policy)] if "batch" in case else [uneven_batch(step, policy) for step in range(2)]


def outcomes(policy, folder, ranks, size, resumed=()):
    """{case: what the ranks computed}; and the names of runs from whose checkpoints of step 1 they go on."""

    def config(name, keys=(), sections=()):
        shared = {"ranks": ranks, "context_parallel": size, **dict(keys)}
        taught = {"teacher": policy} if name in ("taught", "top k") else {}  # it is sampled from at another temperature
        return make_config(policy, folder / name, **dict(sections), **taught, **shared)

    jobs = {
        case: job(
            config(case, *CASES[case]), batches_of(case, policy), random_adapter="adapter" in case,
            set_head=case == "critic",
        )
        for case in CASES
    }  # fmt: skip
    several = [uneven_batch(step, policy) for step in range(3)]
    jobs["whole"] = job(config("whole"), several, save_after=[1])
    for name, other in resumed:
        shutil.copytree(other / "whole" / "checkpoints", config(name).run_dir / "checkpoints")
        jobs[name] = job(config(name), several[1:], restore=True)
    return dict(zip(jobs, run_ranks(ranks, list(jobs.values()), folder), strict=True))


@pytest.fixture(scope="module")
def alone(policy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return outcomes(policy_folder, folder, 1, 1), folder


LAYOUTS = [(2, 2), pytest.param((4, 2), marks=[pytest.mark.full, pytest.mark.turn("4 ranks")])]
"""Ranks, and how many of them share a row."""


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def shared(request, policy_folder, alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    return outcomes(policy_folder, folder, *request.param, [("from one rank", alone[1])]), folder, request.param


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_rank(alone, shared, case):
    ours, theirs = shared[0][case], alone[0][case]
    same(ours["weights"], theirs["weights"])
    same(ours["critic"]["weights"], theirs["critic"]["weights"]) if case == "critic" else None
    for one, other in zip(ours["gradients"], theirs["gradients"], strict=True):
        same(one, other)
    for one, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        measured = {name for name in other if name.endswith("_s") or name in ("micro_batches", "version")}
        expected = {name: other[name] for name in other.keys() - measured}
        assert {name: one[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_batch_trained_again_gives_the_same_bits(policy_folder, tmp_path, layout):
    ranks, size = layout
    batches, shared = (
        [uneven_batch(step, policy_folder) for step in range(2)],
        {"ranks": ranks, "context_parallel": size},
    )
    jobs = [job(make_config(policy_folder, tmp_path / name, **shared), batches) for name in ("once", "again")]
    once, again = run_ranks(ranks, jobs, tmp_path / "ranks")
    assert equal(once["weights"], again["weights"])


@pytest.mark.full
def test_checkpoints_are_read_by_any_layout(alone, shared, policy_folder, tmp_path):
    ours, folder, layout = shared
    same(ours["from one rank"]["weights"], alone[0]["whole"]["weights"])
    if layout == (2, 2):
        config = make_config(policy_folder, tmp_path / "back")
        shutil.copytree(folder / "whole" / "checkpoints", config.run_dir / "checkpoints")
        several = [uneven_batch(step, policy_folder) for step in range(1, 3)]
        (back,) = run_ranks(1, [job(config, several, restore=True)], tmp_path / "one rank")
        assert back["restored"] == 1
        same(back["weights"], ours["whole"]["weights"])


# --- models -----------------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "windows and sinks": GptOssConfig(**SIZES, **EXPERTS, sliding_window=7),
    "soft caps": Gemma2Config(**SIZES, sliding_window=9, attn_logit_softcapping=5.0),
    "one key head": Gemma3TextConfig(**SIZES | {"num_key_value_heads": 1}, sliding_window=5),
}


def saved(config, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_each_rank_sees_whole_sequences_for_its_heads(name, tmp_path):
    policy = load(saved(MODELS[name], tmp_path), 1.0)
    if name == "windows and sinks":
        for layer in policy.lm.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=3.0)
    whole = by_threads(policy, 1)
    for size in (2, 4):
        assert torch.allclose(by_threads(policy, size), whole, atol=1e-4)


REFUSED = {
    "heads": (Qwen3Config(**SIZES), 3, "does not divide the model's 4 heads of queries; use a divisor of them"),
    "a state": (Qwen3NextConfig(**SIZES), 2, "is not for Qwen3NextGatedDeltaNet, which takes a sequence as a whole"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_whose_rows_cannot_be_shared_is_refused(what, tmp_path):
    config, size, said = REFUSED[what]
    config.save_pretrained(tmp_path)
    assert said in objection_to_division(tmp_path, size)
    lm = empty_policy(tmp_path, 1.0).lm
    with pytest.raises(ModelError, match=f"learner.context_parallel = {size} {said}"):
        check_sharing(lm, size)
    check_sharing(lm, 1)


def test_a_model_that_sees_images_is_refused(tmp_path):
    lm = empty_policy(saved(Qwen3Config(**SIZES), tmp_path), 1.0).lm
    lm.model.visual, lm.model.get_rope_index = torch.nn.Module(), None
    lm.model.visual.blocks = torch.nn.ModuleList()
    with pytest.raises(ModelError, match=r"learner\.context_parallel = 2 .*images"):
        check_sharing(lm, 2)


def test_a_layer_that_looks_along_the_row_is_found(tmp_path, monkeypatch):
    """It adds the mean of its own sequence's tokens before each, as far as it sees them."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    folder, forward = saved(Qwen3Config(**SIZES), tmp_path), Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", lambda self, x: forward(self, x) + x.cumsum(1))
    assert "a token's log-probability would be another" in objection_to_division(folder, 2)
