"""Distillation as a loss: divergences over the whole vocabulary or a teacher's top k, made by pieces, with their true
gradient."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from april.config import Config
from april.learner import head_divergence
from april.learner.batch import TrainingBatch
from april.learner.head_divergence import TopKDivergence, divergence_from
from april.learner.loading import ModelError
from april.learner.losses import DIVERGENCES
from april.learner.packing import HeadInputs, longest_input, pack
from april.learner.teacher import Teacher
from april.learner.trainer import Trainer
from tests.support.learner.small_learner import make_config, make_policy, make_sample

MIX = 0.3
PARTS = {name: DIVERGENCES.find(name) for name in DIVERGENCES.shipped}
PARTS["jensen_shannon"] = partial(PARTS["jensen_shannon"], divergence_mix=MIX)


def reference(name, p, q):
    """The divergence of each row from its definition; `p` are the teacher's probabilities, `q` the policy's."""

    def kl(one, other):
        return (one * (one / other).log()).sum(-1)

    mixed = MIX * p + (1 - MIX) * q
    return {
        "forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jensen_shannon": MIX * kl(p, mixed) + (1 - MIX) * kl(q, mixed),
    }[name]  # fmt: skip


def heads(generator, ids, cap):
    """What a policy of 31 ids, and a teacher of `ids`, compute the logits of 7 targets from, in float64."""
    return [
        HeadInputs(*(torch.randn(*shape, generator=generator).double() for shape in ((7, d), (n, d))), divisor, cap)
        for n, d, divisor in ((31, 5, 0.7), (ids, 9, 1.0))
    ]


def probabilities(head):
    z = head.hidden @ head.weight[:31].T / head.divisor
    return (z if head.cap is None else head.cap * (z / head.cap).tanh()).softmax(-1)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("cap", [None, 2.0], ids=["", "capped"])
def test_pieces_have_the_value_and_the_gradient_of_whole_distributions(name, cap, monkeypatch):
    """Also by finite differences, with a teacher whose head has more ids."""
    monkeypatch.setattr(head_divergence, "PIECE_LOGITS", 3 * 31)
    policy, big = heads(torch.Generator().manual_seed(4), 40, cap)
    inputs = policy.hidden.requires_grad_(), policy.weight.requires_grad_()
    ours, theirs = divergence_from(big, PARTS[name], policy), reference(name, probabilities(big), probabilities(policy))
    assert (ours - theirs).abs().max() <= 1e-9
    factors = torch.linspace(-1, 2, 7).double()
    gradients, expected = (torch.autograd.grad((factors * each).sum(), inputs) for each in (ours, theirs))
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).abs().max() <= 1e-9
    assert torch.autograd.gradcheck(
        lambda hidden, weight: divergence_from(big, PARTS[name], HeadInputs(hidden, weight, 0.7, cap)), inputs
    )


@pytest.mark.parametrize("cap", [None, 2.0], ids=["", "capped"])
def test_a_forward_kl_over_the_top_k_has_the_value_and_the_gradient_of_its_definition(cap, monkeypatch):
    """Also by finite differences. The policy's probabilities are those of its whole distribution, at its temperature;
    the teacher's are not renormalised. What is missing, and an id that the policy lacks, count nothing."""
    monkeypatch.setattr(head_divergence, "PIECE_LOGITS", 3 * 31)
    policy, big = heads(torch.Generator().manual_seed(4), 31, cap)
    inputs = policy.hidden.requires_grad_(), policy.weight.requires_grad_()
    p, q = probabilities(big), probabilities(policy)
    top, ids = p.topk(6)
    told = torch.stack([ids.double(), top.log()], -1)
    told[2, 4:], told[5, 0, 0] = torch.nan, 31.0
    counted = torch.ones(7, 6, dtype=bool)
    counted[2, 4:], counted[5, 0] = False, False
    theirs = torch.where(counted, top * (top / q.gather(1, ids)).log(), 0.0).sum(-1)

    def divergence(hidden, weight):
        return TopKDivergence(told, PARTS["forward_kl"])(HeadInputs(hidden, weight, 0.7, cap))

    ours = divergence(*inputs)
    assert (ours - theirs).abs().max() <= 1e-9
    factors = torch.linspace(-1, 2, 7).double()
    gradients, expected = (torch.autograd.grad((factors * each).sum(), inputs) for each in (ours, theirs))
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).abs().max() <= 1e-9
    assert torch.autograd.gradcheck(divergence, inputs)
    part = TopKDivergence(told, PARTS["forward_kl"]).part(slice(2, 4))
    assert part(HeadInputs(policy.hidden[2:4], policy.weight, 0.7, cap)).equal(ours[2:4]), "of ranks that share a row"
    every = TopKDivergence(torch.stack([torch.arange(31.0).expand(7, 31), p.log()], -1), PARTS["forward_kl"])
    whole = divergence_from(big, PARTS["forward_kl"], policy)
    assert (every(policy) - whole).abs().max() <= 1e-9, "over all ids it is that of whole distributions"


def test_a_teacher_that_lacks_ids_of_the_policy_is_refused(policy_folder, tmp_path):
    small = make_policy(tmp_path / "small")
    config = make_config(policy_folder, tmp_path, teacher=small, algorithm={"divergence": "forward_kl"})
    lm, small = (AutoModelForCausalLM.from_pretrained(policy_folder) for _ in range(2))
    small.resize_token_embeddings(20)
    backend = SimpleNamespace(lm=lm, teacher=lambda path: SimpleNamespace(lm=small))
    with pytest.raises(ModelError, match=r"20 ids .*23"):
        Teacher.of(config, backend)
    assert Teacher.of(Config.model_validate({"model": {"path": "."}, "data": {}}), backend) is None


def test_a_policy_teaches_itself_only_where_it_sees_a_hint():
    plain, shown = (make_sample(np.random.default_rng(3), 3, tokens, 1.0) for tokens in (2, 4))
    shown = replace(shown, hinted_prompt=np.arange(5, 12, dtype=np.int32))
    micros = [pack(samples, torch.device("cpu")) for samples in ([plain, shown], [plain])]
    assert list(map(longest_input, (plain, shown))) == [4, 10], "the budget of micro-batches counts the hint"
    assert micros[0].hinted.seq_lens == [4, 10] and micros[0].hinted.targets.equal(micros[0].targets)

    def head(micro, inputs_alone=True, kept_head=None):
        return HeadInputs(torch.ones(len(micro.targets), 5), torch.ones(31, 5), 1.0, None)

    compared = [(micro, lambda theirs, ours: torch.ones(len(ours))) for micro in micros]
    shown = Teacher(head, None, by_hint=True).shown([*compared, (micros[0], None)])
    *shown, alone = shown
    assert alone is micros[0], "samples whose algorithm has no divergence are not compared"
    found = [micro.divergence(head(micro)).tolist() for micro in shown]
    assert found == [[0, 0, 1, 1, 1, 1], [0, 0]]


def test_a_teacher_s_head_is_copied_once_and_its_tokens_count_in_the_balance_of_ranks(
    one_rank, policy_folder, tmp_path
):
    plain = make_sample(np.random.default_rng(3), 3, 4, 1.0)
    shown = replace(plain, hinted_prompt=np.arange(20, dtype=np.int32))
    keys = {"divergence": "forward_kl", "hint": "{prompt} It is {label}."}
    trainer = Trainer(make_config(policy_folder, tmp_path / "run", algorithm=keys), torch.device("cpu"))
    (objective,) = trainer.algorithms.objectives
    packed = [pack(samples, trainer.device) for samples in ([plain, shown], [shown], [plain])]
    micros = trainer.teacher.shown([(micro, objective.divergence) for micro in packed])
    heads = [micro.divergence.args[1].args[0].weight for micro in micros]
    assert heads[0].data_ptr() != trainer.policy.lm.get_output_embeddings().weight.data_ptr()
    assert all(head is heads[0] for head in heads)
    costs = [trainer.operations(sample, objective) for sample in (plain, shown)]
    assert costs[1] - costs[0] == trainer.backend.cost.of(23, 4) - trainer.backend.cost.of(6, 4)
    assert trainer.prepare(TrainingBatch(0, [[plain, shown]])).operations == sum(costs)
