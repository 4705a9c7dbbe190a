"""Registries of the published algorithms: small pure functions over per-token columns, one concept a file.

A column has one entry for each of the K response tokens of a micro-batch, sequence after sequence; `Spans` maps tokens
to sequences. Columns computed by the policy under training carry gradients, all others do not.
"""

from april.util.registry import Registry

LOSSES = Registry(
    "algorithm.loss",
    "loss",
    {name: f"april.learner.losses.policy:{name}" for name in ("ppo", "gspo", "gspo_token", "cispo")}
    | {"bapo": "april.learner.losses.policy:bapo"},
)
CORRECTIONS = Registry(
    "algorithm.corrections",
    "correction",
    {
        name: f"april.learner.losses.corrections:{name}"
        for name in ("truncated", "truncated_sequence", "icepop", "geometric")
    }
    | {name: f"april.learner.losses.corrections:{name}" for name in ("on_policy_only", "vespo", "m2po", "dppo_tv")},
)
ADVANTAGES = Registry(
    "algorithm.advantage",
    "advantage estimator",
    {
        name: f"april.learner.losses.advantages:{name}"
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
    }
    | {"gae": "april.learner.losses.gae:gae", "opob": "april.learner.losses.advantages:opob"},
)
"""Advantage estimators. By default they take the rewards, group by group (`advantages`); an estimator with the
attribute `needs_values` takes a critic's values (`gae`), one with `needs_norms` also the gradient norm of each response
(`opob`)."""
STEP_SCALES = Registry("algorithm.step_scale", "step scale", {"root_ess": "april.learner.losses.advantages:root_ess"})
"""Functions (metrics of an optimizer step) -> factor on the learning rate of that step."""
