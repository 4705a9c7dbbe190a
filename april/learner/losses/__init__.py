"""Registries of the published algorithms: small pure functions over per-token columns, one concept a file.

A column has one entry for each of the K response tokens of a micro-batch, sequence after sequence; `Spans` maps tokens
to sequences. Columns computed by the policy under training carry gradients, all others do not.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from april.config.section import bound
from april.config.training import AlgorithmSection
from april.util.errors import refuse
from april.util.registry import Registry

LOSSES = Registry(
    "algorithm.loss",
    "loss",
    {
        "ppo": "april.learner.losses.policy:ppo",
        "gspo": "april.learner.losses.policy:gspo",
        "gspo_token": "april.learner.losses.policy:gspo_token",
        "cispo": "april.learner.losses.policy:cispo",
        "bapo": "april.learner.losses.policy:bapo",
        "cross_entropy": "april.learner.losses.policy:cross_entropy",
    },
)
CORRECTIONS = Registry(
    "algorithm.corrections",
    "correction",
    {
        "truncated": "april.learner.losses.corrections:truncated",
        "truncated_sequence": "april.learner.losses.corrections:truncated_sequence",
        "icepop": "april.learner.losses.corrections:icepop",
        "geometric": "april.learner.losses.corrections:geometric",
        "on_policy_only": "april.learner.losses.corrections:on_policy_only",
        "vespo": "april.learner.losses.corrections:vespo",
        "m2po": "april.learner.losses.corrections:m2po",
        "dppo_tv": "april.learner.losses.corrections:dppo_tv",
    },
)
ADVANTAGES = Registry(
    "algorithm.advantage",
    "advantage estimator",
    {
        "grpo": "april.learner.losses.advantages:grpo",
        "dr_grpo": "april.learner.losses.advantages:dr_grpo",
        "rloo": "april.learner.losses.advantages:rloo",
        "reinforce_pp": "april.learner.losses.advantages:reinforce_pp",
        "reinforce_pp_baseline": "april.learner.losses.advantages:reinforce_pp_baseline",
        "gae": "april.learner.losses.gae:gae",
        "opob": "april.learner.losses.advantages:opob",
        "pass_at_k": "april.learner.losses.pass_at_k:pass_at_k",
        "gdpo": "april.learner.losses.gdpo:gdpo",
        "no_reward": "april.learner.losses.distillation:no_reward",
        "no_baseline": "april.learner.losses.advantages:no_baseline",
    },
)
"""Registry of advantage estimators. By default they take the rewards, group by group, and return advantages of the same
form (`advantages`); an estimator with the attribute `needs_values` takes a critic's values (`gae`), one with
`needs_norms` also the gradient norm of each response (`opob`), one with `needs_parts` the parts of the reward
(`gdpo`)."""
LENGTH_PENALTIES = Registry(
    "algorithm.length_penalty",
    "length penalty",
    {"kimi": "april.learner.losses.length:kimi", "alp": "april.learner.losses.length:alp"},
)
"""Registry of functions (rewards, lengths of the responses), group by group -> what is added to the rewards, times
`algorithm.length_coef`, before the advantages are computed."""
STEP_SCALES = Registry("algorithm.step_scale", "step scale", {"root_ess": "april.learner.losses.advantages:root_ess"})
"""Functions (metrics of an optimizer step) -> factor on the learning rate of that step."""
DISTILLATIONS = Registry(
    "algorithm.distillation", "distillation", {"reverse_kl": "april.learner.losses.distillation:reverse_kl"}
)
"""Functions that give advantages of tokens from a teacher's log-probabilities (`april.learner.losses.distillation`)."""
DIVERGENCES = Registry(
    "algorithm.divergence",
    "divergence",
    {
        "forward_kl": "april.learner.losses.divergences:forward_kl",
        "reverse_kl": "april.learner.losses.divergences:reverse_kl",
        "jensen_shannon": "april.learner.losses.divergences:jensen_shannon",
    },
)
"""Registry of divergences of the policy from a teacher: over the whole vocabulary, or, for a function with the
attribute `over_top_k`, over the teacher's top k ids."""

ATTRIBUTES = ("clip_of_batch", "needs_norms", "needs_parts", "needs_values", "over_the_batch", "over_top_k")
"""Names of attributes by which a function in a registry says which arguments it takes; a callable object may have them
from its class."""


# --- what parts return ------------------------------------------------------------------------------------------------


def find_checked(registry: Registry, name: str, section: AlgorithmSection) -> Callable[..., Any]:
    """The function called `name` in a registry, with its keyword-only parameters bound to the values in `section`. A
    user-defined one is wrapped: its exceptions get a note with its key and name, and a result of another kind or shape
    than this registry's functions have to return raises ConfigError."""
    found = registry.find(name)
    part = bound(found, section)
    if name in registry.shipped:
        return part

    @functools.wraps(found)
    def call(*arguments: Any) -> Any:
        try:
            result = part(*arguments)
        except Exception as error:
            error.add_note(f"key {registry.key!r} = {name!r} raised it")
            raise
        if fault := FAULTS[registry.key](result, arguments):
            refuse(registry.key, name, f"returned {fault}", "mend it; docs/extending.md says what each part returns")
        return result

    call.__dict__.update({name: getattr(found, name) for name in ATTRIBUTES if hasattr(found, name)})
    return call


def loss_fault(result: Any, arguments: Sequence[Any]) -> str:
    logprobs = arguments[0]
    if not isinstance(result, tuple) or len(result) != 2:
        return f"{describe(result)}, and has to return a tuple: the loss of each token, and whether it was clipped"
    if fault := column_fault(result[0], logprobs) or column_fault(result[1], logprobs):
        return fault
    has_gradient = result[0].requires_grad or not logprobs.requires_grad
    return "" if has_gradient else "losses without a gradient, since they do not depend on `logprobs`"


def correction_fault(result: Any, arguments: Sequence[Any]) -> str:
    columns = result if isinstance(result, tuple) else (result,)
    if len(columns) > 2:
        return f"{describe(result)}, and has to return weights, or weights and which of them a cap has reduced"
    return next(filter(None, (column_fault(column, arguments[0].logprobs) for column in columns)), "")


def advantage_fault(result: Any, arguments: Sequence[Any]) -> str:
    rewards = arguments[0]
    if not isinstance(rewards, list):
        return column_fault(result, rewards)
    if not isinstance(result, list | tuple) or len(result) != len(rewards):
        return f"{describe(result)}, and has to return a list of {len(rewards)} tensors, one for each group"
    responses = (group if group.dim() == 1 else group[:, 0] for group in rewards)
    return next(filter(None, map(column_fault, result, responses)), "")


def divergence_fault(result: Any, arguments: Sequence[Any]) -> str:
    logprobs = arguments[1]
    if fault := column_fault(result, logprobs[:, 0]):
        return fault
    has_gradient = result.requires_grad or not logprobs.requires_grad
    return "" if has_gradient else "divergences without a gradient, since they do not depend on `logprobs`"


def scale_fault(result: Any, arguments: Sequence[Any]) -> str:
    return "" if isinstance(result, int | float) and 0 <= result < float("inf") else f"{result!r}, which is no factor"


FAULTS = {
    LOSSES.key: loss_fault, CORRECTIONS.key: correction_fault, ADVANTAGES.key: advantage_fault,
    LENGTH_PENALTIES.key: advantage_fault, STEP_SCALES.key: scale_fault,
    DISTILLATIONS.key: lambda result, arguments: column_fault(result, arguments[0]),
    DIVERGENCES.key: divergence_fault,
}  # fmt: skip
"""By configuration key of a registry: function (result, arguments) -> what is wrong with the result of one of its
functions; "" if nothing is."""


def column_fault(found: Any, like: Any) -> str:
    fits = hasattr(found, "requires_grad") and found.shape == like.shape
    return "" if fits else f"{describe(found)}, and has to return a tensor of shape {list(like.shape)}"


def describe(found: Any) -> str:
    if hasattr(found, "requires_grad"):
        return f"a tensor of shape {list(found.shape)}"
    if isinstance(found, list | tuple):
        return f"a {type(found).__name__} of {len(found)}"
    return f"{type(found).__name__} {found!r}"[:80]
