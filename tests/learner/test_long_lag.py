"""Corrections for a long lag: by hand, as other implementations compute them, and for any split."""

import math
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch

from april.config.training import AlgorithmSection
from april.learner.losses.advantages import root_ess
from april.learner.losses.corrections import dppo_tv, largest_kept_moment, m2po, vespo
from april.learner.losses.policy import Clip, balanced_clip
from april.learner.trainer import Trainer
from tests.support.learner.comparison import equal
from tests.support.learner.loss_inputs import stale, stale_tokens
from tests.support.learner.recorded_losses import MASK, column, our_loss, trl_loss
from tests.support.learner.small_learner import flat_batch, make_config, poisoned, stale_batch, uneven_batch

VECTORS = orjson.loads((Path(__file__).parents[1] / "support/learner/long_lag_vectors.json").read_bytes())


# --- by hand ----------------------------------------------------------------------------------------------------


def test_vespo_weighs_a_response_by_its_whole_ratio_and_the_sign_of_its_advantage():
    section = AlgorithmSection(vespo_k_positive=2, vespo_lambda_positive=3, vespo_k_negative=1, vespo_lambda_negative=2)
    seen = stale_tokens(
        [1.0, 2.0, 0.25, 0.5, 0.5, 3e8, 3.0], [1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0], lengths=[1, 2, 2, 2]
    )
    half, quarter = 0.5**2 * math.exp(3 * 0.5), 0.25 * math.exp(2 * 0.75)
    assert vespo(seen, section).tolist() == pytest.approx([1.0, half, half, quarter, quarter, 0.0, 0.0])


def test_m2po_masks_the_largest_log_ratios_until_the_mean_of_the_rest_is_below_its_threshold():
    squares = torch.tensor([0.09, 0.0, 0.01, 0.04, 0.01, 0.81])
    assert largest_kept_moment(squares, 0.04) == pytest.approx(0.09), "(0.09 + 0.04 + 2 * 0.01) / 5 = 0.03"
    assert largest_kept_moment(squares, 0.03) == pytest.approx(0.04), "a mean of 0.03 is not below 0.03"
    assert largest_kept_moment(squares, 0.006) == 0.0, "two that have moved equally far go or stay together"
    assert largest_kept_moment(squares, 1.0) == pytest.approx(0.81) and largest_kept_moment(squares[:0], 1.0) == -1.0
    ratios = [math.exp(0.3), 1.0, math.exp(-0.9), math.exp(5.0)]
    mask = m2po(stale_tokens(ratios, [1.0, -1.0, 1.0, 0.0]), AlgorithmSection(m2po_threshold=0.1))
    assert mask.tolist() == [1, 1, 0, 1], "a token without an advantage has no part in it"


def test_dppo_masks_tokens_that_the_step_would_move_further_out_of_the_trust_region():
    seen = stale_tokens([1.2, 1.2, 0.8, 0.8, 1.04], [1.0, -1.0, 1.0, -1.0, 1.0], behaviour=math.log(0.5))
    assert dppo_tv(seen, AlgorithmSection(dppo_rise=0.05, dppo_fall=0.05)).tolist() == [0, 1, 1, 0, 1]
    rare = stale_tokens([3.0, 0.01], [1.0, -1.0], behaviour=math.log(0.001))
    assert dppo_tv(rare, AlgorithmSection()).tolist() == [1, 1], "however far the ratio of a rare token has gone"


def test_bapo_raises_the_lower_bound_first_and_stops_once_positive_advantages_reach_their_target():
    seen = replace(stale_tokens([2.0, 0.9], [1.0, -2.0]), proximal_logprobs=torch.zeros(2))
    section = AlgorithmSection(bapo_lower=0.8, bapo_lower_step=0.15, bapo_upper=3.0, bapo_upper_step=0.25)
    found = balanced_clip(seen, Clip(0.4, 0.2), section)
    assert (1 - found.low, 1 + found.high) == pytest.approx((0.8, 1.95)), "1.8 are wanted, and 1.7 is a step too few"
    enough = balanced_clip(seen, Clip(0.4, 0.2, dual=3.0), section.model_copy(update={"bapo_target": 0.5}))
    assert (enough.low, enough.high, enough.dual) == pytest.approx((0.4, 0.2, 3.0)), "1.2 are enough of 0.9"


def test_the_learning_rate_scales_with_the_root_of_the_effective_sample_size():
    assert root_ess({"sequence_ess": 0.25}) == 0.5
    assert root_ess({}) == 1.0, "nothing was trained"


# --- as others compute it ---------------------------------------------------------------------------------------


def equals(ours, theirs):
    loss, gradient = ours
    assert loss == pytest.approx(theirs["loss"], rel=1e-5)
    assert gradient.tolist() == pytest.approx(theirs["gradient"], rel=1e-5, abs=1e-8)


@pytest.mark.xdist_group("trl")
def test_the_loss_and_gradients_of_vespo_are_those_of_trl():
    keys = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    loss, gradient = trl_loss("vespo", vespo=keys)
    ours = our_loss({"loss": "cispo", "proximal": "recomputed", "corrections": ["vespo"]})
    equals(ours, {"loss": loss, "gradient": gradient.tolist()})


def test_the_loss_and_gradients_of_dppo_are_those_of_verl():
    low, high, cap = (VECTORS["dppo_tv"]["keys"][f"clip_ratio_{end}"] for end in ("low", "high", "c"))
    corrected = {"proximal": "recomputed", "corrections": ["truncated", "dppo_tv"], "truncation": cap}
    equals(our_loss({"loss": "cispo", "dppo_fall": low, "dppo_rise": high, **corrected}), VECTORS["dppo_tv"])


@pytest.mark.parametrize("threshold", VECTORS["m2po"])
def test_the_mask_of_m2po_is_that_of_areal(threshold):
    now, mu, advantages = column("logprobs"), column("behaviour"), column("advantages")
    seen = replace(stale(now, mu, advantages, MASK.sum(1).long().tolist()), proximal_logprobs=mu)
    mask = m2po(seen, AlgorithmSection(m2po_threshold=float(threshold))).int().tolist()
    assert mask == VECTORS["m2po"][threshold] and 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("case", VECTORS["bapo"])
def test_the_loss_and_gradients_of_bapo_are_those_of_its_authors(one_rank, case):
    theirs = VECTORS["bapo"][case]["keys"]
    ours = {
        "clip_low": 1 - theirs["ratio_lower_start"], "clip_high": max(theirs["ratio_upper_start"] - 1, 1e-9),
        "dual_clip": 1.5, "bapo_target": theirs["adv_ratio_target"], "bapo_lower": theirs["ratio_lower_max"],
        "bapo_lower_step": theirs["ratio_lower_step"], "bapo_upper": theirs["ratio_upper_max"],
        "bapo_upper_step": theirs["ratio_upper_step"],
    }  # fmt: skip
    equals(our_loss({"loss": "bapo", **ours}), VECTORS["bapo"][case])


# --- however a batch is split -----------------------------------------------------------------------------------

WHOLE = {"loss": "bapo", "clip_low": 0.4, "clip_high": 0.05, "bapo_upper": 1.25, "bapo_target": 2.0}
WHOLE |= {"corrections": ["m2po"], "m2po_threshold": 0.05}


def test_a_batch_that_trains_nothing_or_is_not_finite_changes_no_weight(one_rank, policy_folder, tmp_path):
    trainer = Trainer(make_config(policy_folder, tmp_path, algorithm=WHOLE), torch.device("cpu"))
    before, batch = trainer.weights(), poisoned(uneven_batch(0, policy_folder))
    for each, figure in ((flat_batch(0), "update_skipped"), (batch, "nonfinite")):
        assert trainer.step(each)[figure] == 1
        assert equal(trainer.weights(), before)
    assert trainer.step(uneven_batch(0, policy_folder))["update_skipped"] == 0


def test_batch_wide_corrections_do_not_depend_on_the_split_into_micro_batches(one_rank, policy_folder, tmp_path):
    """Bounds and mask are those of the batch in one micro-batch or many, and repeated steps give the same weights."""
    batch, outcomes = stale_batch(policy_folder), []
    for place, budget in enumerate((16, 100_000, 16)):
        config = make_config(policy_folder, tmp_path / str(place), algorithm=WHOLE, microbatch_tokens=budget)
        trainer = Trainer(config, torch.device("cpu"))
        figures = [trainer.step(batch) for _ in range(2)]
        outcomes.append(([each["loss"] for each in figures], figures[0]["mask_fraction"], trainer.weights()))
    (many, masked, weights), (one, as_masked, _), (again, _, same) = outcomes
    assert many == pytest.approx(one, rel=1e-5) and many == again
    assert 0 < masked == as_masked < 1
    assert equal(weights, same)
