"""What other frameworks do about stale tokens is said where April's formula is theirs, and named where it is not."""

import pytest

from april.trainers.convert.openrlhf import IS, OpenRLHF
from april.trainers.convert.trl import TRL
from april.trainers.convert.verl import ACTOR, IMPORTANCE, ROLLOUT, Verl
from tests.support.converted_scripts import assert_says, converted, flags, python_script

MODEL = {
    "actor.model_name_or_path": "m",
    "data.prompt_dataset": "d",
    "rollout.n_samples_per_prompt": 8,
    "train.batch_size": 8192,
}
MASK = {f"{IS}level": "token", f"{IS}threshold": "0.5 5.0"}
CLIP = {f"{IS}level": "token", f"{IS}mode": "clip", f"{IS}threshold": "2.0"}
SEQUENCES = {"corrections": ("truncated", "geometric"), "truncation": 1e9, "geometric_low": 0.9, "geometric_high": 1.1}
OPENRLHF = {
    "off by default": ({}, {"corrections": ()}, ""),
    "a band": (MASK, {"corrections": ("icepop",), "icepop_low": 0.5, "icepop_high": 5.0}, ""),
    "one bound": (CLIP, {"corrections": ("truncated",), "truncation": 2.0}, ""),
    "two bounds": (CLIP | {f"{IS}threshold": "0.5 2.0"}, {"truncation": 2.0}, f"{IS}threshold = [0.5, 2.0]"),
    "responses": ({f"{IS}level": "seq", f"{IS}threshold": "0.9 1.1"}, SEQUENCES, ""),
    "responses, by the old name": (
        {f"{IS}enable": None, f"{IS}type": "seq-mask-tis", f"{IS}threshold": "0.9 1.1"}, SEQUENCES, "",
    ),
    "gspo": (MASK | {"actor.policy_loss_type": "gspo"}, {"corrections": (), "proximal": "behaviour"}, ""),
    "a divergence": (MASK | {f"{IS}gating": "tv"}, {"corrections": ()}, f"{IS}gating = 'tv'"),
    "a mean of responses": ({"actor.loss_agg_mode": "seq-mean-token-mean"}, {"normalisation": "sequence_mean"}, ""),
    "the gradient of k2": (
        {"algo.kl.use_loss": None, "algo.kl.estimator": "k1", "algo.kl.unbiased_gradient": None},
        {"kl_estimator": "k2", "kl_coef": 0.01}, "",
    ),
}  # fmt: skip
"""options of OpenRLHF 0.11.2, what April says, and what it names"""
VESPO = {
    "model": "m", "reward_funcs": "accuracy_reward", "loss_type": "vespo", "vespo_k_neg": 2.5, "use_vllm": True,
    "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None, "max_steps": 3,
}  # fmt: skip
DPPO = {
    f"{ACTOR}policy_loss.loss_mode": "dppo_tv", f"{ACTOR}clip_ratio_c": 20, f"{IMPORTANCE}rollout_is": "token",
    "actor_rollout_ref.model.path": "m", "data.train_files": "d", f"{ROLLOUT}n": 8, f"{ACTOR}ppo_mini_batch_size": 1024,
}  # fmt: skip


def algorithm(keys):
    return {f"algorithm.{key}": value for key, value in keys.items()}


def unsupported_with(translation, beginnings):
    return [name for name in translation.unsupported if name.removeprefix("default of ").startswith(beginnings)]


@pytest.mark.parametrize("case", OPENRLHF)
def test_openrlhf_s_correction_is_translated(case, tmp_path):
    options, keys, differs = OPENRLHF[case]
    script = f"python3 -m openrlhf.cli.train_ppo_ray {flags(MODEL | options)}".replace("\n", " \\\n")
    translation, config = converted(OpenRLHF(), script, tmp_path)
    assert_says(config, algorithm(keys))
    assert unsupported_with(translation, IS) == [differs] * bool(differs) and not unsupported_with(
        translation, ("actor.loss_agg", "algo.kl.unb")
    )
    assert not [name for name in translation.undecided if name.startswith(IS)]


@pytest.mark.parametrize("bound", [None, 3.0])
def test_trl_s_vespo_is_april_s_where_no_token_s_ratio_is_bounded(bound, tmp_path):
    script = python_script("GRPO", VESPO | {"vllm_importance_sampling_clip_max": bound})
    translation, config = converted(TRL(), script, tmp_path, "mine.py")
    says = {"loss": "cispo", "corrections": ("vespo",), "normalisation": "token_mean", "proximal": "recomputed"}
    assert_says(config, algorithm(says | {"vespo_k_positive": 2.0, "vespo_k_negative": 2.5}))
    assert unsupported_with(translation, "vllm_") == ([f"vllm_importance_sampling_clip_max = {bound}"] if bound else [])
    again, _ = converted(TRL(), python_script("GRPO", VESPO | {"num_iterations": 2}), tmp_path, "mine.py")
    assert unsupported_with(again, "loss_type") and not unsupported_with(translation, "loss_type")
    _, alone = converted(TRL(), python_script("GRPO", VESPO | {"use_vllm": False}), tmp_path, "mine.py")
    assert_says(alone, algorithm({"loss": "cispo", "corrections": ()}))


def test_verl_s_dppo_is_translated_and_its_difference_is_listed(tmp_path):
    def translated(options):
        lines = " ".join(f"{key}={value}" for key, value in options.items())
        return converted(Verl(), f"python3 -m verl.trainer.main_ppo {lines}", tmp_path)

    translation, config = translated(DPPO)
    says = {"loss": "cispo", "corrections": ("truncated", "dppo_tv"), "truncation": 2.0, "dppo_rise": 0.2}
    assert_says(config, algorithm(says))
    assert unsupported_with(translation, f"{ACTOR}policy_loss") == [f"{ACTOR}policy_loss.loss_mode = 'dppo_tv'"]
    bypassed, config = translated(DPPO | {f"{IMPORTANCE}bypass_mode": True})
    assert "algorithm.loss" in bypassed.undecided and (config.algorithm.proximal, config.algorithm.corrections) == (
        "behaviour",
        (),
    )
