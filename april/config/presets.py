"""Presets: the keys that a paper's algorithm fixes, by its name. A key that the user gives wins over its preset.

Learning rates, batch sizes and lengths belong to a model and a machine, and no preset sets them.
"""

from typing import Any

SHARED = {
    "algorithm.proximal": "behaviour",
    "algorithm.corrections": [],
    "algorithm.behaviour_coef": 0.0,
    "algorithm.advantage": "grpo",
    "algorithm.entropy_coef": 0.0,
}
"""Keys that all three presets share: ratio and clip are relative to the policy that sampled the tokens, and corrections
of stale tokens are off."""

PRESETS: dict[str, dict[str, Any]] = {
    # "DeepSeekMath", arXiv 2402.03300, equation 3 and section 4.2
    "grpo": {
        **SHARED,
        "algorithm.loss": "ppo",
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.2,
        "algorithm.normalisation": "sequence_mean",
        "algorithm.kl_coef": 0.04,
        "algorithm.kl_estimator": "k3",
        "reward.overlong_buffer_tokens": 0,
        "schedule.dynamic_sampling": False,
    },
    # "DAPO", arXiv 2503.14476, sections 3 and 4.1
    "dapo": {
        **SHARED,
        "algorithm.loss": "ppo",
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.28,
        "algorithm.normalisation": "token_mean",
        "algorithm.kl_coef": 0.0,
        "reward.overlong_penalty": 1.0,
        "schedule.dynamic_sampling": True,
    },
    # "Group Sequence Policy Optimization", arXiv 2507.18071, section 5.1
    "gspo": {
        **SHARED,
        "algorithm.loss": "gspo",
        "algorithm.clip_low": 3e-4,
        "algorithm.clip_high": 4e-4,
        "algorithm.normalisation": "sequence_mean",
        "algorithm.kl_coef": 0.0,
        "reward.overlong_buffer_tokens": 0,
        "schedule.dynamic_sampling": False,
    },
}

OVERLONG_SHARE = 5
"""Ratio of the response budget to DAPO's overlong buffer: 20,480 tokens to 4,096."""


def fill_preset(tree: Any, default_budget_tokens: int) -> Any:
    """`tree`, a configuration before validation, completed by the keys of its `algorithm.preset`.
    `default_budget_tokens`: the response budget if `tree` gives none."""
    if not isinstance(tree, dict) or not isinstance(tree.get("algorithm"), dict):
        return tree
    name = tree["algorithm"].get("preset")
    if not isinstance(name, str) or name not in PRESETS:
        return tree
    values = dict(PRESETS[name])
    if name == "dapo":
        values["reward.overlong_buffer_tokens"] = budget_tokens(tree, default_budget_tokens) // OVERLONG_SHARE
    filled = dict(tree)
    for key, value in values.items():
        section, _, field = key.partition(".")
        given = filled.get(section, {})
        if isinstance(given, dict):
            filled[section] = {field: value} | given
    return filled


def budget_tokens(tree: dict[str, Any], default: int) -> int:
    sampling = tree.get("sampling")
    found = sampling.get("max_response_tokens", default) if isinstance(sampling, dict) else default
    return found if isinstance(found, int) else default
