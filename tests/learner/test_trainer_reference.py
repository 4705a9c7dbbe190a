"""A step on 1 and 2 ranks equals the single-process reference, however the samples are packed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from april.learner.batch import TrainingBatch
from april.weights.canary import Canary
from tests.support.learner.comparison import assert_said_by, equal, same
from tests.support.learner.reference import ReferenceLearner
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import (
    flat_batch,
    job,
    make_config,
    make_policy,
    make_sample,
    near_policy,
    settings,
    told_batch,
    uneven_batch,
)

pytestmark = pytest.mark.xdist_group("trainer_reference")
BUDGETS = (8, 64, 150, 100_000)
"""Token budgets: 8 is below most samples, 64 below the longest, 100,000 holds all in one micro-batch."""
UNCLIPPED = {"grad_clip": 1e9}


def three_samples(policy):
    """A budget that leaves one of two ranks without samples in the last micro-batch."""
    rng = np.random.default_rng(9)
    group = [make_sample(rng, 4, tokens, reward) for tokens, reward in [(5, 1.0), (11, 0.0), (1, 0.0)]]
    return near_policy(TrainingBatch(0, [group]), policy, rng)


def hinted(batch):
    """The batch with other prompts, of other lengths, for the policy as its own teacher."""
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (9, 2, 6)]
    [group] = batch.groups
    return TrainingBatch(0, [[replace(one, hinted_prompt=ids) for one, ids in zip(group, prompts, strict=True)]])


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.full), 2])
def ranks(request):
    return request.param


def trained(ranks, cases, folder):
    """{case: (what the ranks computed, config, batches)}"""
    results = run_ranks(ranks, [job(*case) for case in cases.values()], folder)
    return {name: (result, *case) for (name, case), result in zip(cases.items(), results, strict=True)}


@pytest.fixture(scope="module")
def packed(ranks, policy_folder, tmp_path_factory):
    """Outcomes of the same batch in micro-batches of each budget."""
    folder, batch = tmp_path_factory.mktemp(f"packed{ranks}"), uneven_batch(0, policy_folder)
    configs = [make_config(policy_folder, folder / f"b{n}", microbatch_tokens=n, **UNCLIPPED) for n in BUDGETS]
    return trained(ranks, {f"budget {n}": (each, [batch]) for n, each in zip(BUDGETS, configs, strict=True)}, folder)


@pytest.fixture(scope="module")
def outcome(ranks, policy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"ranks{ranks}")
    batch = uneven_batch(0, policy_folder)

    def config(name, **learner):
        return make_config(policy_folder, folder / name, **learner)

    cases = {"idle rank": (config("i", microbatch_tokens=1, **UNCLIPPED), [three_samples(policy_folder)])}
    several = [batch, flat_batch(1), uneven_batch(2, policy_folder)]
    cases["three steps"] = (config("t", microbatch_tokens=64, grad_clip=0.05, weight_decay=0.1), several)
    keys = {"divergence": "jensen_shannon", "divergence_mix": 0.3, "divergence_coef": 2.0, "advantage": "no_reward"}
    keys |= {"normalisation": "token_mean"}
    taught = {"teacher": make_policy(folder / "teacher", layers=1), "microbatch_tokens": 1, **UNCLIPPED}
    cases["taught"] = (config("taught", algorithm=keys, **taught), [three_samples(policy_folder)])
    asked = keys | {"divergence": "forward_kl", "distillation_coef": 1.0}
    cases["top k"] = (
        config("top", algorithm=asked, top_k=3, **taught), [told_batch(three_samples(policy_folder), 3)]
    )  # fmt: skip
    for name, budget in (("hinted", 1), ("hinted together", 64)):
        itself = config(name, algorithm=keys | {"hint": "{prompt}{label}"}, microbatch_tokens=budget, **UNCLIPPED)
        cases[name] = (itself, [hinted(three_samples(policy_folder))])
    cases["all flat"] = (config("f", weight_decay=0.1), [flat_batch(0)])
    cases["warm-up"] = (config("w", warmup_steps=4), [flat_batch(0), batch, batch])
    return trained(ranks, cases, folder)


@pytest.mark.full
@pytest.mark.parametrize("case", [*(f"budget {budget}" for budget in BUDGETS), "idle rank"])
def test_loss_gradients_and_metrics_equal_the_reference(packed, outcome, policy_folder, case):
    result, config, (batch,) = (packed | outcome)[case]
    expected = ReferenceLearner(policy_folder, settings(config)).step(batch.groups)
    metrics = result["metrics"][0]
    assert metrics["loss"] == pytest.approx(expected.loss, rel=0, abs=1e-5 * max(expected.summed, 0.1))
    assert metrics["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
    same(result["gradients"][0], expected.gradients)
    assert {name: metrics[name] for name in expected.means} == pytest.approx(expected.means, rel=1e-4, abs=1e-6)
    assert 0 < metrics["clip_fraction"] < 1


def test_updated_weights_equal_the_reference_after_several_steps(outcome, policy_folder):
    result, config, batches = outcome["three steps"]
    reference = ReferenceLearner(policy_folder, settings(config))
    norms = [reference.step(batch.groups).grad_norm for batch in batches]
    assert [m["grad_norm"] for m in result["metrics"]] == pytest.approx(norms, rel=1e-3)
    assert norms[0] > config.learner.grad_clip
    for name, parameter in reference.lm.named_parameters():
        off = (result["weights"][name] - parameter.detach()).abs()
        assert off.mean() < 1e-3 * config.learner.lr, name
        assert off.max() < 0.1 * config.learner.lr, name


def test_the_parts_that_the_ranks_gather_are_the_weights_that_rank_0_gathers(outcome):
    result, *_ = outcome["three steps"]
    assert equal(result["from_parts"], result["weights"])


def test_all_ranks_score_the_canary_and_keep_only_their_shards(outcome, policy_folder):
    result, *_ = outcome["three steps"]
    assert_said_by(result["weights"], Canary(**result["canary"]), policy_folder)
    assert result["whole_policy"] == []


def distributions(model, sample, temperature):
    """Of the tokens of a response, [K, V]."""
    text = torch.from_numpy(sample.tokens[None, :-1]).long()
    return (model(text).logits[0, sample.prompt_tokens - 1 :] / temperature).softmax(-1)


@pytest.mark.parametrize("case", ["taught", "hinted", "hinted together"])
def test_what_a_teacher_teaches_is_that_of_whole_distributions(outcome, policy_folder, case):
    """A model that the learner holds, or the policy itself with a hint before the response."""
    result, config, (batch,) = outcome[case]
    folders = policy_folder, config.teacher["held"].path if case == "taught" else policy_folder
    policy, teacher = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    divergence, temperature = torch.zeros(()), config.sampling.temperature
    for sample in batch.samples:
        seen = sample.with_hint if "hinted" in case else sample
        theirs = distributions(teacher, seen, temperature if "hinted" in case else 1.0).detach()
        ours = distributions(policy, sample, temperature)
        mixed = 0.3 * theirs + 0.7 * ours
        divergence = divergence + (0.3 * theirs * (theirs / mixed).log() + 0.7 * ours * (ours / mixed).log()).sum()
    loss = 2 * divergence / 17
    loss.backward()
    assert result["metrics"][0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert result["metrics"][0]["teacher_divergence"] == pytest.approx(loss.item() / 2, rel=1e-5)
    same(result["gradients"][0], {name: parameter.grad for name, parameter in policy.named_parameters()})


def test_a_scorer_s_teacher_teaches_its_top_k_on_all_ranks(outcome, policy_folder):
    """By hand, over the ids that it has told; a sample of which it has told nothing learns nothing."""
    result, config, (batch,) = outcome["top k"]
    policy = AutoModelForCausalLM.from_pretrained(policy_folder)
    divergence, mass = torch.zeros(()), 0.0
    for sample in batch.samples[:-1]:
        ours = distributions(policy, sample, config.sampling.temperature)
        told = torch.from_numpy(sample.token_scores["held/top_k"]).view(-1, 3, 2)
        theirs, ids = told[..., 1].exp(), told[..., 0].long()
        divergence = divergence + (theirs * (theirs / ours.gather(1, ids)).log()).sum()
        mass += theirs.sum().item()
    loss = 2 * divergence / 17
    loss.backward()
    metrics = result["metrics"][0]
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["teacher_divergence"] == pytest.approx(loss.item() / 2, rel=1e-5)
    assert metrics["teacher_top_k_mass"] == pytest.approx(mass / 17, rel=1e-5)
    same(result["gradients"][0], {name: parameter.grad for name, parameter in policy.named_parameters()})


def test_a_batch_without_reward_spread_changes_nothing_and_counts_as_a_step(outcome, policy_folder):
    result, config, _ = outcome["all flat"]
    before = ReferenceLearner(policy_folder, settings(config)).lm.state_dict()
    assert equal(result["weights"], before)
    metrics = result["metrics"][0]
    assert (metrics["update_skipped"], metrics["zero_spread_groups"], metrics["trained_tokens"]) == (1, 2, 0)
    assert (metrics["loss"], metrics["grad_norm"], metrics["tokens"]) == (0, 0, 30)
    assert result["optimizer_steps"] == 0


def test_warm_up_is_linear_in_optimizer_steps(outcome):
    result, config, _ = outcome["warm-up"]
    lr = config.learner.lr
    assert [m["lr"] for m in result["metrics"]] == pytest.approx([lr / 4, lr / 4, lr / 2])


def test_every_rank_runs_equally_many_micro_batches_and_dummies_change_nothing(outcome, request):
    result, *_ = outcome["idle rank"]
    assert result["metrics"][0]["micro_batches"] == (2 if "2" in request.node.name else 3)
    assert result["metrics"][0]["trained_tokens"] == 17
