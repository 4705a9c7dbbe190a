"""Inputs of advantage estimators (values of a critic, gradient norms, parts of a reward), and checks of the keys that
have to fit them."""

from april.config.algorithms import used_algorithms
from april.config.rewards import check_apart
from april.config.section import own_parameters
from april.config.sections import Config
from april.config.training import AlgorithmSection, CriticSection
from april.util.errors import refuse
from april.util.registry import registry_of


def needs_values(algorithm: AlgorithmSection, imported: bool) -> bool | None:
    """Whether the advantage estimator needs a critic's values. `imported`: whether user-defined estimators are imported
    to find out; if not, the answer for one is None (unknown)."""
    return advantage_flag("needs_values", algorithm, imported)


def needs_norms(algorithm: AlgorithmSection, imported: bool) -> bool | None:
    """Whether the advantage estimator needs the norm of each response's gradient. `imported`: whether user-defined
    estimators are imported to find out; if not, the answer for one is None (unknown)."""
    return advantage_flag("needs_norms", algorithm, imported)


def needs_parts(algorithm: AlgorithmSection, imported: bool) -> bool | None:
    """Whether the advantage estimator takes the parts of the reward separately, instead of their sum. `imported`:
    whether user-defined estimators are imported to find out; if not, the answer for one is None (unknown)."""
    return advantage_flag("needs_parts", algorithm, imported)


def advantage_flag(name: str, algorithm: AlgorithmSection, imported: bool) -> bool | None:
    registry = registry_of("algorithm.advantage")
    if not imported and algorithm.advantage not in registry.shipped:
        return None
    return bool(getattr(registry.find(algorithm.advantage), name, False))


def needs_critic(config: Config, imported: bool = False) -> bool | None:
    """Whether the samples of any source need a critic's values. `imported`: whether user-defined advantage estimators
    are imported to find out; if not, the answer for one is None (unknown). Raises ConfigError."""
    found = {needs_values(each, imported) for each in used_algorithms(config).values()}
    return True if True in found else None if None in found else False


def check_critic(config: Config, imported: bool = False) -> None:
    """Refuse keys of `[critic]` in a run without a critic, a `critic.warmup_batches` that leaves the policy no batch,
    and one critic for two sources with different advantages or turn discounts. `imported`: whether user-defined
    advantage estimators are imported and checked, too."""
    critic, used = config.critic, used_algorithms(config)
    wanted, valued = needs_critic(config, imported), {k: a for k, a in used.items() if needs_values(a, imported)}
    given = [key for key, value in critic if value != CriticSection.model_fields[key].default]
    if wanted is False and given:
        with_critic = registry_of("algorithm.advantage").names_where(lambda part: getattr(part, "needs_values", False))
        asked = " and ".join(f"{key}.advantage = {each.advantage!r}" for key, each in used.items())
        refuse(
            f"critic.{given[0]}",
            getattr(critic, given[0]),
            f"is of a critic, which {asked} does not ask for",
            f"set algorithm.advantage = {with_critic}, or leave it out",
        )
    for name in ("advantage", "turn_discount"):
        (key, first), *others = valued.items() or [("", None)]
        for other, algorithm in others:
            if getattr(algorithm, name) != getattr(first, name):
                why = f"is not that of {key}, and one critic serves both"
                refuse(f"{other}.{name}", getattr(algorithm, name), why, "give both the same")
    if wanted is not False and critic.warmup_batches >= config.schedule.max_steps:
        refuse(
            "critic.warmup_batches",
            critic.warmup_batches,
            f"leaves none of schedule.max_steps = {config.schedule.max_steps} to the policy",
            "lower it",
        )


def check_compared(config: Config, imported: bool = False) -> None:
    """Refuse groups of one sample if the advantage compares the samples of a group, and a KL term both in the reward
    and in the loss. `imported`: whether user-defined advantage estimators are imported and checked, too."""
    n, critic, algorithm = config.schedule.n_samples_per_prompt, config.critic, config.algorithm
    if needs_values(algorithm, imported) is False:
        if n < 2 and not advantage_flag("takes_single_samples", algorithm, imported):
            refuse(
                "schedule.n_samples_per_prompt",
                n,
                "gives group-relative advantages nothing to compare",
                "use 2 or more",
            )
        return
    if critic.kl_coef and algorithm.kl_coef:
        refuse(
            "critic.kl_coef",
            critic.kl_coef,
            f"takes from the reward what algorithm.kl_coef = {algorithm.kl_coef} adds to the loss already",
            "set one of them to 0",
        )


def check_advantage(config: Config, imported: bool = False) -> None:
    """Refuse an advantage of the parts of the reward if there are none, a length penalty if the advantage does not
    compare rewards within groups, and an `algorithm.pass_k` above the group size. `imported`: whether user-defined
    advantage estimators are imported and checked, too."""
    algorithm, n = config.algorithm, config.schedule.n_samples_per_prompt
    if needs_parts(algorithm, imported):
        check_apart(config.reward, algorithm.advantage)
    if algorithm.length_penalty and any(
        needs(algorithm, imported) for needs in (needs_values, needs_norms, needs_parts)
    ):
        refuse(
            "algorithm.length_penalty",
            algorithm.length_penalty,
            f"is added to rewards, which algorithm.advantage = {algorithm.advantage!r} does not compare in groups",
            "leave it out, or use reward.overlong_buffer_tokens",
        )
    if algorithm.turn_reward and config.agent.is_set:
        refuse("algorithm.turn_reward", algorithm.turn_reward, "is not given to sessions of agents", "leave it out")
    if algorithm.turn_reward and any(needs(algorithm, imported) for needs in (needs_norms, needs_parts)):
        refuse(
            "algorithm.turn_reward",
            algorithm.turn_reward,
            f"credits turns, and algorithm.advantage = {algorithm.advantage!r} compares whole responses",
            "leave it out, or use another advantage",
        )
    if algorithm.turn_reward and algorithm.length_penalty:
        refuse(
            "algorithm.length_penalty",
            algorithm.length_penalty,
            "compares whole responses, and algorithm.turn_reward credits turns",
            "leave one out",
        )
    if algorithm.pass_k > n and takes_key("pass_k", algorithm, imported):
        refuse("algorithm.pass_k", algorithm.pass_k, f"is more than schedule.n_samples_per_prompt = {n}", "lower it")
    check_discards(config, imported)


def check_discards(config: Config, imported: bool = False) -> None:
    """Refuse a group filter that compares rewards (`dynamic_sampling`, `zero_spread`) with an advantage that ignores
    them: if a verifier scores all responses alike, the filter would discard every group. `imported`: whether
    user-defined advantage estimators and filters are imported and checked, too."""
    schedule, filters = config.schedule, registry_of("schedule.group_filter")
    if not advantage_flag("ignores_rewards", config.algorithm, imported):
        return
    name = schedule.group_filter
    known = bool(name) and (imported or name in filters.shipped)
    by_rewards = known and getattr(filters.find(name), "compares_rewards", False)
    for key, value, compares in (
        ("dynamic_sampling", schedule.dynamic_sampling, schedule.dynamic_sampling),
        ("group_filter", name, by_rewards),
    ):
        if compares:
            why = f"discards groups by rewards, which algorithm.advantage = {config.algorithm.advantage!r} ignores"
            refuse(f"schedule.{key}", value, why, "leave it out, or use another advantage")


def takes_key(key: str, algorithm: AlgorithmSection, imported: bool) -> bool:
    """Whether the advantage estimator has a keyword-only parameter called `key`; False for a user-defined estimator
    unless `imported`."""
    registry = registry_of("algorithm.advantage")
    known = imported or algorithm.advantage in registry.shipped
    return known and key in own_parameters(registry.find(algorithm.advantage))
