"""The published algorithms as small pure functions over per-token columns, one concept a file.

A column has one entry for each of the K response tokens of a micro-batch, sequence after sequence; `Spans` says
where each sequence lies. Columns that come from the policy under training carry gradients, all others do not.
"""

from april.registry import Registry

LOSSES = Registry(
    "algorithm.loss",
    "loss",
    {name: f"april.learner.losses.policy:{name}" for name in ("ppo", "gspo", "gspo_token", "cispo")}
    | {"bapo": "april.learner.losses.bapo:bapo"},
)
CORRECTIONS = Registry(
    "algorithm.corrections",
    "correction",
    {
        "truncated": "april.learner.losses.corrections:truncate",
        "truncated_sequence": "april.learner.losses.corrections:truncate_sequences",
        "icepop": "april.learner.losses.corrections:keep_within_a_band",
        "geometric": "april.learner.losses.corrections:keep_sequences_within_a_band",
        "on_policy_only": "april.learner.losses.corrections:keep_the_newest",
        "vespo": "april.learner.losses.vespo:vespo",
        "m2po": "april.learner.losses.m2po:m2po",
        "dppo_tv": "april.learner.losses.dppo_tv:dppo_tv",
    },
)
ADVANTAGES = Registry(
    "algorithm.advantage",
    "advantage estimator",
    {
        name: f"april.learner.losses.advantages:{name}"
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
    }
    | {"gae": "april.learner.losses.gae:gae", "opob": "april.learner.losses.opob:opob"},
)
"""By rewards, group by group (`advantages`); of one that says `needs_values`, by a critic's values (`gae`);
of one that says `needs_norms`, by the gradient of each response as well (`opob`)."""
STEP_SCALES = Registry("algorithm.step_scale", "step scale", {"root_ess": "april.learner.losses.root_ess:root_ess"})
"""Functions (figures of a step) -> what its learning rate is multiplied by."""
