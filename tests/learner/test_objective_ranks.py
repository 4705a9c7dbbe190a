"""On 2 ranks, too, any two of loss, correction and normalisation together, and steps in a row; on 4 ranks each of them
once."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest

from april.config import Config
from april.learner.batch import TrainingBatch
from tests.support.learner.algorithm_cases import ADVANTAGES, CORRECTIONS, LOSSES, NORMALISATIONS
from tests.support.learner.frozen_weights import FrozenReference, assert_equals, short
from tests.support.learner.reference import ReferenceLearner
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import SHIPPED, job, make_config, settings, stale_batch

pytestmark = pytest.mark.xdist_group("objective_ranks")
WITH_SHIPPED = CORRECTIONS | {"shipped": SHIPPED}
PENALTIES = {
    "no penalty": {},
    "divergence": {"kl_coef": 0.1},
    "entropy": {"entropy_coef": 0.05},
    "behaviour": {"behaviour_coef": 0.2},
}
CHOICES = (LOSSES, WITH_SHIPPED, NORMALISATIONS, ADVANTAGES, PENALTIES)
BUDGETS = (8, 64, 150, 1000)
"""As many budgets as have no divisor in common with the choices, so that each choice meets every budget."""


CASES = [
    (*case, list(ADVANTAGES)[place % len(ADVANTAGES)], list(PENALTIES)[place // 2 % len(PENALTIES)])
    for place, case in enumerate(product(LOSSES, WITH_SHIPPED, NORMALISATIONS))
]
"""Every loss with every correction and normalisation; advantages and penalties alternate."""
LATIN = [
    case
    for case in CASES
    if sum(list(choices).index(choice) for choices, choice in zip(CHOICES[:3], case, strict=False)) % 3 == 0
]
"""A third of the cases, with any two of loss, correction and normalisation together."""
EACH = [case for case in LATIN if list(WITH_SHIPPED).index(case[1]) % len(LOSSES) == list(LOSSES).index(case[0])]
"""Every loss, correction and normalisation in one case at least."""
FOUR = [pytest.mark.full, pytest.mark.turn("4 ranks")]
SHARES = [
    pytest.param((2, LATIN), id="2", marks=[pytest.mark.full, pytest.mark.turn("2 ranks")]),
    pytest.param((4, EACH), id="4", marks=FOUR),
]
STEPS = {
    "plain": ("ppo", "clip", {"normalisation": "token_mean", "kl_coef": 0.1}),
    "sequences": ("gspo", "interpolated, not weighed", {"normalisation": "sequence_mean", "kl_coef": 0.1}),
    "rejection": ("ppo dual", "truncated and geometric", {"normalisation": "constant", "entropy_coef": 0.05}),
    "masked": ("cispo", "on-policy only", {"normalisation": "sequence_mean", "kl_coef": 0.1, "kl_estimator": "k2"}),
    "shipped": ("ppo", "shipped", {}),
    "by the batch": ("bapo", "m2po", {"step_scale": "root_ess"}),
}
"""Cases with two steps each: the second starts from weights that differ from the initial ones."""
BY_SOURCE = LOSSES["ppo"] | CORRECTIONS["m2po"] | {"kl_coef": 0.1}, LOSSES["bapo"] | CORRECTIONS["none"]
"""Algorithms of two sources: one has a reference policy, and each has an input of its own over all ranks."""


def test_any_two_choices_occur_together_in_a_case():
    for one, other in combinations(range(len(CHOICES)), 2):
        assert {(case[one], case[other]) for case in CASES} == set(product(CHOICES[one], CHOICES[other]))
    for one, other in combinations(range(3), 2):
        assert {(case[one], case[other]) for case in LATIN} == set(product(CHOICES[one], CHOICES[other]))
    assert all({case[each] for case in EACH} == set(CHOICES[each]) for each in range(3))


def config_of(policy, folder, place, algorithm):
    budget = BUDGETS[place % len(BUDGETS)]
    return make_config(policy, folder, algorithm=algorithm, grad_clip=1e9, microbatch_tokens=budget)


@pytest.fixture(scope="module")
def cases(policy_folder, tmp_path_factory):
    """{case: its configuration}"""
    folder, configs = tmp_path_factory.mktemp("cases"), {}
    for place, case in enumerate(CASES):
        loss, correction, normalisation, advantage, penalty = case
        choices = {"normalisation": normalisation, "advantage": advantage}
        algorithm = LOSSES[loss] | WITH_SHIPPED[correction] | choices | PENALTIES[penalty]
        configs[case] = config_of(policy_folder, folder, place, algorithm)
    return configs


@pytest.fixture(scope="module")
def steps(policy_folder, tmp_path_factory):
    """{name: its configuration}"""
    folder, configs = tmp_path_factory.mktemp("steps"), {}
    for place, (name, (loss, correction, more)) in enumerate(STEPS.items()):
        configs[name] = config_of(policy_folder, folder, place, LOSSES[loss] | WITH_SHIPPED[correction] | more)
    return configs


@pytest.fixture(scope="module")
def expected(policy_folder, cases):
    """expected(case) -> the reference's step"""
    batch, folder = short(stale_batch(policy_folder)), next(iter(cases.values())).run_dir
    reference = FrozenReference(policy_folder, folder)
    return cache(lambda case: reference.expected(batch, cases[case]))


@pytest.fixture(scope="module", params=SHARES)
def outcome(request, policy_folder, cases, steps, tmp_path_factory):
    """{case or name: what the ranks computed}"""
    (ranks, chosen), batch = request.param, stale_batch(policy_folder)
    jobs = [job(config, [batch, batch]) for config in steps.values()]
    compare = [cases[case].model_dump(mode="json") for case in chosen]
    jobs.append(job(next(iter(cases.values())), [short(batch)], compare=compare))
    *of_steps, of_cases = run_ranks(ranks, jobs, tmp_path_factory.mktemp(f"ranks{ranks}"))
    return dict(zip(steps, of_steps, strict=True)) | dict(zip(chosen, of_cases["outcomes"], strict=True))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=FOUR)])
def of_short_form(request, policy_folder, steps, tmp_path_factory):
    """(what ranks computed of a plain step, and of a batch of two sources)"""
    folder, batch = tmp_path_factory.mktemp(f"few{request.param}"), stale_batch(policy_folder)
    sources = of_two_sources(policy_folder, folder / "sources")
    compared = job(sources, [from_two(batch)], compare=[sources.model_dump(mode="json")])
    plain, apart = run_ranks(request.param, [job(steps["plain"], [batch]), compared], folder)
    return plain, apart["outcomes"][0]


def of_two_sources(policy, folder):
    """Each source has its algorithm; micro-batches hold two samples or so."""
    first, second = BY_SOURCE
    tree = make_config(policy, folder, algorithm=first, grad_clip=1e9, microbatch_tokens=64).model_dump(mode="json")
    sources = [{"path": "unused.jsonl"}, {"path": "unused.jsonl", "algorithm": second | {"kl_coef": 0.0}}]
    return Config.model_validate(tree | {"data": {"sources": sources}})


def from_two(batch):
    """The short samples of a batch, with one group of four from the second source."""
    groups = enumerate(short(batch).groups)
    return TrainingBatch(batch.step, [[replace(each, source=int(n == 1)) for each in group] for n, group in groups])


def test_the_algorithms_of_two_sources_add_up_over_ranks_to_their_references(of_short_form, policy_folder, tmp_path):
    metrics, gradients = of_short_form[1]
    batch, expected, losses = from_two(stale_batch(policy_folder)), {}, 0.0
    reference = FrozenReference(policy_folder, tmp_path)
    for source, algorithm in enumerate(BY_SOURCE):
        groups = [group for group in batch.groups if group[0].source == source]
        reference.known.clear()
        config = make_config(policy_folder, tmp_path, algorithm=algorithm)
        alone = reference.expected(TrainingBatch(batch.step, groups), config)
        share = len(groups) / len(batch.groups)
        losses += share * alone.loss
        expected = {name: expected.get(name, 0) + share * value for name, value in alone.gradients.items()}
        assert metrics[f"clip_fraction_source_{source}"] == pytest.approx(alone.means["clip_fraction"], abs=1e-6)
    assert metrics["loss"] == pytest.approx(losses, abs=1e-5)
    largest = max(value.abs().max().item() for value in expected.values())
    for name, value in expected.items():
        assert (gradients[name] - value).abs().max().item() <= 1e-5 * largest, name


@pytest.mark.full
@pytest.mark.parametrize("correction", WITH_SHIPPED)
def test_ranks_add_up_to_the_reference(outcome, expected, correction):
    computed = [case for case in CASES if case[1] == correction and case in outcome]
    assert computed
    for case in computed:
        assert_equals(*outcome[case], expected(case))


def test_the_reference_policy_is_resharded_after_a_step(of_short_form):
    assert of_short_form[0]["whole"] == []


@pytest.mark.full
@pytest.mark.parametrize("name", STEPS)
def test_steps_on_several_ranks_equal_the_reference(outcome, policy_folder, steps, name):
    batch = stale_batch(policy_folder)
    reference = ReferenceLearner(policy_folder, settings(steps[name]), padded=True)
    for place, tolerance in enumerate((1e-5, 1e-3)):
        wanted = reference.step(batch.groups, batch.step)
        assert_equals(outcome[name]["metrics"][place], outcome[name]["gradients"][place], wanted, tolerance)
