"""Advantages, losses, corrections and normalisations to compare with the reference."""

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
LOSSES = {
    "ppo": {"loss": "ppo"},
    "ppo dual": {"loss": "ppo", "dual_clip": 1.5},
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.03},
    "gspo_token": {"loss": "gspo_token", "clip_low": 0.05, "clip_high": 0.03},
    "cispo": {"loss": "cispo"},
    "bapo": {"loss": "bapo", "clip_low": 0.4, "clip_high": 0.05, "bapo_upper": 1.25, "bapo_target": 2.0},
}
BAND = {"geometric_low": 0.95, "geometric_high": 1.1}
CORRECTIONS = {
    "none": {"proximal": "recomputed", "corrections": []},
    "clip": {"proximal": "behaviour", "corrections": []},
    "truncated": {"proximal": "recomputed", "corrections": ["truncated"], "truncation": 1.2},
    "icepop": {"proximal": "recomputed", "corrections": ["icepop"], "icepop_low": 0.8, "icepop_high": 1.3},
    "geometric": {"proximal": "behaviour", "corrections": ["geometric"], **BAND},
    "truncated and geometric": {
        "proximal": "recomputed",
        "corrections": ["truncated", "geometric"],
        "truncation": 1.2,
        **BAND,
    },
    "truncated_sequence": {"proximal": "recomputed", "corrections": ["truncated_sequence"], "sequence_truncation": 1.5},
    "decoupled sequence": {
        "proximal": "interpolated",
        "corrections": ["truncated_sequence"],
        "sequence_truncation": 1.5,
    },
    "decoupled": {"proximal": "interpolated", "corrections": ["truncated"], "truncation": 1.2},
    "interpolated, not weighed": {"proximal": "interpolated", "corrections": []},
    "decoupled icepop": {"proximal": "interpolated", "corrections": ["icepop"], "icepop_low": 0.8, "icepop_high": 1.3},
    "on-policy only": {"proximal": "recomputed", "corrections": ["on_policy_only"]},
    "vespo": {"proximal": "recomputed", "corrections": ["vespo"]},
    "m2po": {"proximal": "behaviour", "corrections": ["m2po"], "m2po_threshold": 0.05},
    "dppo": {
        "proximal": "recomputed",
        "corrections": ["truncated", "dppo_tv"],
        "truncation": 1.2,
        "dppo_rise": 0.02,
        "dppo_fall": 0.02,
    },
    "decoupled dppo and m2po": {
        "proximal": "interpolated",
        "corrections": ["dppo_tv", "m2po"],
        "dppo_rise": 0.02,
        "dppo_fall": 0.02,
    },
}
NORMALISATIONS = ("token_mean", "sequence_mean", "constant")
