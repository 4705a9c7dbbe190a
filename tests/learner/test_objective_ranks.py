"""On 2 and 4 ranks, too: a selection in which every loss, correction, normalisation and penalty occurs.

Two steps each, so that the second one starts from weights that differ from the reference policy.
"""

import pytest
from learner_setup import SHIPPED, job, make_config, run_ranks, settings, stale_batch
from reference import ReferenceLearner
from test_objective_reference import CORRECTIONS, LOSSES, NORMALISATIONS

SELECTION = {
    "plain": ("ppo", "clip", {"normalisation": "token_mean", "kl_coef": 0.1}),
    "dual": ("ppo dual", "none", {"normalisation": "sequence_mean", "advantage": "rloo"}),
    "importance": ("ppo", "truncated", {"normalisation": "constant", "advantage": "dr_grpo", "behaviour_coef": 0.2}),
    "sequences": ("gspo", "interpolated, not weighed", {"normalisation": "sequence_mean", "kl_coef": 0.1}),
    "tokens of sequences": ("gspo_token", "geometric", {"advantage": "reinforce_pp"}),
    "band": ("cispo", "icepop", {"normalisation": "constant", "advantage": "reinforce_pp_baseline"}),
    "decoupled": ("ppo", "decoupled", {"normalisation": "token_mean", "entropy_coef": 0.05}),
    "decoupled sequence": ("ppo", "decoupled sequence", {"kl_coef": 0.1, "kl_estimator": "k1"}),
    "decoupled band": ("gspo", "decoupled icepop", {"normalisation": "constant"}),
    "rejection": ("ppo", "truncated and geometric", {"normalisation": "sequence_mean"}),
    "capped sequence": ("cispo", "truncated_sequence", {"normalisation": "sequence_mean"}),
    "masked": ("cispo", "on-policy only", {"normalisation": "sequence_mean", "kl_coef": 0.1, "kl_estimator": "k2"}),
    "shipped": ("ppo", "shipped", {}),
}
BUDGETS = (8, 64, 150)


def test_every_loss_correction_normalisation_and_penalty_is_selected():
    losses, corrections, keys = zip(*SELECTION.values(), strict=True)
    assert set(losses) == {*LOSSES} and set(corrections) == {*CORRECTIONS, "shipped"}
    assert {more.get("normalisation", "token_mean") for more in keys} == {*NORMALISATIONS}
    assert {"kl_coef", "entropy_coef", "behaviour_coef"} <= {key for more in keys for key in more}


@pytest.fixture(scope="module", params=[2, 4])
def outcome(request, policy_folder, tmp_path_factory):
    """{case: (what the ranks computed, config)}"""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    batch = stale_batch(policy_folder)
    configs = {}
    for i, (name, (loss, correction, more)) in enumerate(SELECTION.items()):
        algorithm = LOSSES[loss] | (CORRECTIONS | {"shipped": SHIPPED})[correction] | more
        configs[name] = make_config(
            policy_folder,
            folder / f"case{i}",
            algorithm=algorithm,
            grad_clip=1e9,
            microbatch_tokens=BUDGETS[i % len(BUDGETS)],
        )
    results = run_ranks(request.param, [job(config, [batch, batch]) for config in configs.values()], folder)
    return {name: (result, configs[name]) for name, result in zip(configs, results, strict=True)}


@pytest.mark.parametrize("case", SELECTION)
def test_ranks_add_up_to_the_reference(outcome, policy_folder, case):
    result, config = outcome[case]
    batch = stale_batch(policy_folder)
    reference = ReferenceLearner(policy_folder, settings(config), padded=True)
    for step, tolerance in enumerate((1e-5, 1e-3)):
        expected = reference.step(batch.groups, batch.step)
        metrics, gradients = result["metrics"][step], result["gradients"][step]
        assert metrics["loss"] == pytest.approx(expected.loss, rel=tolerance, abs=1e-6)
        largest = max(value.abs().max().item() for value in expected.gradients.values())
        for name, value in expected.gradients.items():
            assert (gradients[name] - value).abs().max() <= tolerance * largest, name
        figures = {name: metrics[name] for name in expected.means}
        assert figures == pytest.approx(expected.means, rel=10 * tolerance, abs=1e-5)
