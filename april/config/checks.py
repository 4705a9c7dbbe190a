"""What is valid key by key but cannot work together; each refusal names the key, the value and the mend."""

import re
from collections.abc import Collection

from april.config.addresses import check_addresses, check_checkpoint_store, check_listening
from april.config.algorithm import AlgorithmSection
from april.config.critic import CriticSection
from april.config.data import DataSection
from april.config.evaluation import check_evaluation, check_paths
from april.config.lora import check_lora
from april.config.naming import is_shipped, names_at, shipped
from april.config.sections import BrokerSection, Config, ScheduleSection
from april.config.sharing import check_divided, check_sharing, check_turns
from april.config.workers import EnvironmentSection
from april.errors import ConfigError
from april.registry import ROOMS, registry_of
from april.wire.limits import TOP_K

BANDS = [
    key.removesuffix("_low") for key in AlgorithmSection.model_fields if key.endswith("_low") and key != "clip_low"
]
"""keys of [algorithm] that come with a low and a high end"""
HUB_NAME = r"[\w.-]+/[\w.-]+"
INPUTS = ("model", "data")
"""what a run reads; its data is read by the broker alone, which may be on another machine"""


def check(config: Config, inputs: Collection[str] = INPUTS) -> None:
    """Refuse what is valid key by key but cannot work together, and those of the `inputs` that are not there.

    Parts of somebody's own, named as `package.module:Name`, are not imported here: not every part of a run has them.
    `april.launch.check` looks at them, and whoever uses one.
    """
    check_names(config)
    check_schedule(config.schedule, imported=is_shipped(config, "schedule.kind"))
    check_minibatches(config)
    check_sampling(config)
    check_evaluation(config.evaluation, config.evaluation_sets)
    check_algorithm(config.algorithm, imported=False)
    check_critic(config)
    check_lora(config.lora)
    check_checkpoint_store(config.learner.checkpoint_store)
    check_sharing(config)
    backend = shipped(config, "learner.backend")
    if backend:
        backend.check(config)
    check_turns(config, shipped(config, "schedule.kind"), backend)
    check_addresses(config)
    check_leases(config.broker)
    check_reward(config)
    check_environment(config.environment)
    check_agent(config)
    if "model" in inputs:
        check_model(config)
    if "data" in inputs:
        check_data(config.data)
        check_paths(config.evaluation_sets)
    if is_shipped(config, "worker.engine"):
        check_engine(config)


def check_names(config: Config) -> None:
    """Refuse a name that is neither that of a shipped part nor a place of one's own."""
    for key in ROOMS:
        for name in names_at(config, key):
            registry_of(key).check_name(name)


def check_schedule(schedule: ScheduleSection, imported: bool = True) -> None:
    """Refuse what the ledger cannot do, and what the kind of schedule cannot, if that is `imported`."""
    kind = registry_of("schedule.kind").find(schedule.kind) if imported else None
    if key := schedule.automatic_key:
        if kind:
            check_automatic(schedule, kind.dial and kind.dial.key)
        schedule = schedule.model_copy(update={key: None})
    n, groups, per_round = schedule.n_samples_per_prompt, schedule.rollout_batch_size, schedule.groups_per_round
    if kind:
        kind.check(schedule)
    admitted = schedule.batches_in_reach * groups
    if per_round > admitted:
        raise ConfigError(
            f"key 'schedule.over_sampling_batch_size' = {per_round} exceeds {admitted}, the most that "
            f"schedule.max_staleness = {schedule.max_staleness} allows for N = {groups}"
            f"{' with overlap' if schedule.overlap else ''}; lower it or raise max_staleness"
        )
    if schedule.min_group_size and schedule.min_group_size > n:
        raise ConfigError(
            f"key 'schedule.min_group_size' = {schedule.min_group_size} exceeds n = {n}; use a value from 1 to {n}"
        )


def check_automatic(schedule: ScheduleSection, wanted: str | None) -> None:
    """Refuse `auto` where there is nothing to choose; `wanted`: the key that can be chosen."""
    key = schedule.automatic_key
    if wanted is None:
        able = registry_of("schedule.kind").those(lambda kind: kind.dial)
        raise ConfigError(
            f"key 'schedule.{key}' = 'auto' has nothing to choose where schedule.kind = {schedule.kind!r}; "
            f"use schedule.kind = {able}, or leave the key out"
        )
    if key != wanted:
        raise ConfigError(
            f"key 'schedule.{key}' = 'auto' is not what schedule.kind = {schedule.kind!r} goes by; "
            f"set schedule.{wanted} = 'auto'"
        )


def check_minibatches(config: Config) -> None:
    if config.learner.minibatches > config.schedule.rollout_batch_size:
        raise ConfigError(
            f"key 'learner.minibatches' = {config.learner.minibatches} is more than the "
            f"{config.schedule.rollout_batch_size} groups of a batch, each of which is in one minibatch; set it to at "
            "most schedule.rollout_batch_size"
        )


def check_sampling(config: Config) -> None:
    """Training samples may be drawn from a part of the distribution where the engine returns which part that was."""
    if not config.sampling.is_cut:
        return
    if is_shipped(config, "worker.engine"):
        check_supports(config)
    if config.sampling.top_k < 2:
        key, value = cut_of(config)
        raise ConfigError(
            f"key 'sampling.{key}' = {value} does not bound what travels with every token, the ids that it was drawn "
            f"from; set sampling.top_k from 2 to {TOP_K}"
        )


def check_supports(config: Config) -> None:
    """Refuse a cut of the distribution where the engine does not say what is left."""
    engines = registry_of("worker.engine")
    if config.sampling.is_cut and not engines.find(config.worker.engine).returns_supports:
        key, value = cut_of(config)
        able = engines.those(lambda engine: engine.returns_supports)
        raise ConfigError(
            f"key 'sampling.{key}' = {value} cuts the distribution, and worker.engine = {config.worker.engine!r} does "
            f"not say what is left of it, without which training would be biased; set worker.engine = {able}, or "
            "use top_k = 0, top_p = 1.0 and min_p = 0.0"
        )


def cut_of(config: Config) -> tuple[str, float]:
    """The key of [sampling] that cuts the distribution, and its value."""
    whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    sampling = config.sampling
    return next((key, getattr(sampling, key)) for key in whole if getattr(sampling, key) != whole[key])


def check_algorithm(algorithm: AlgorithmSection, imported: bool = True) -> None:
    """What parts of somebody's own say of themselves is asked only if they are `imported`."""
    registry, losses = registry_of("algorithm.corrections"), registry_of("algorithm.loss")
    asked = [name for name in algorithm.corrections if imported or name in registry.shipped]
    weighing = [name for name in asked if getattr(registry.find(name), "weighs", False)]
    if weighing and algorithm.proximal == "behaviour":
        raise ConfigError(
            f"key 'algorithm.corrections' = {list(algorithm.corrections)} holds {weighing[0]!r}, which weighs 1 around "
            "the behaviour policy; set algorithm.proximal = 'recomputed' or 'interpolated', or leave it out"
        )
    if len(weighing) > 1 or len(set(algorithm.corrections)) < len(algorithm.corrections):
        raise ConfigError(
            f"key 'algorithm.corrections' = {list(algorithm.corrections)} applies the same ratio twice; name each "
            f"correction once, and only one of {registry.those(lambda found: getattr(found, 'weighs', False))}"
        )
    if algorithm.dual_clip is not None and (imported or algorithm.loss in losses.shipped):
        able = losses.those(lambda loss: getattr(loss, "takes_dual_clip", False))
        if not getattr(losses.find(algorithm.loss), "takes_dual_clip", False):
            raise ConfigError(
                f"key 'algorithm.dual_clip' = {algorithm.dual_clip} is for algorithm.loss = {able}, not "
                f"{algorithm.loss!r}; leave it out"
            )
    if algorithm.constant_tokens is not None and algorithm.normalisation != "constant":
        raise ConfigError(
            f"key 'algorithm.constant_tokens' = {algorithm.constant_tokens} is for algorithm.normalisation = "
            f"'constant', not {algorithm.normalisation!r}; leave it out"
        )
    for band in BANDS:
        low, high = getattr(algorithm, f"{band}_low"), getattr(algorithm, f"{band}_high")
        if low >= high:
            raise ConfigError(
                f"key 'algorithm.{band}_low' = {low} is not below algorithm.{band}_high = {high}, so every token "
                "would be masked; lower it"
            )


def needs_values(algorithm: AlgorithmSection, imported: bool) -> bool | None:
    """Whether its advantage asks for a critic; None of one of somebody's own, unless it is `imported`."""
    return advantage_says("needs_values", algorithm, imported)


def needs_norms(algorithm: AlgorithmSection, imported: bool) -> bool | None:
    """Whether its advantage asks for the gradient of each response; None as of `needs_values`."""
    return advantage_says("needs_norms", algorithm, imported)


def advantage_says(what: str, algorithm: AlgorithmSection, imported: bool) -> bool | None:
    registry = registry_of("algorithm.advantage")
    if not imported and algorithm.advantage not in registry.shipped:
        return None
    return bool(getattr(registry.find(algorithm.advantage), what, False))


def check_critic(config: Config, imported: bool = False) -> None:
    """Refuse a critic's keys where there is none, and what cannot work with one."""
    n, critic, algorithm = config.schedule.n_samples_per_prompt, config.critic, config.algorithm
    wanted = needs_values(algorithm, imported)
    if wanted is False:
        given = [key for key, value in critic if value != CriticSection.model_fields[key].default]
        if given:
            raise ConfigError(
                f"key 'critic.{given[0]}' = {getattr(critic, given[0])} is of a critic, which algorithm.advantage = "
                f"{algorithm.advantage!r} does not ask for; set algorithm.advantage = "
                f"{registry_of('algorithm.advantage').those(lambda found: getattr(found, 'needs_values', False))}, "
                "or leave it out"
            )
        if n < 2:
            raise ConfigError(
                f"key 'schedule.n_samples_per_prompt' = {n} gives group-relative advantages nothing to compare; "
                "use 2 or more"
            )
        return
    if critic.kl_coef and algorithm.kl_coef:
        raise ConfigError(
            f"key 'critic.kl_coef' = {critic.kl_coef} takes from the reward what algorithm.kl_coef = "
            f"{algorithm.kl_coef} adds to the loss already; set one of them to 0"
        )
    if critic.warmup_batches >= config.schedule.max_steps:
        raise ConfigError(
            f"key 'critic.warmup_batches' = {critic.warmup_batches} leaves none of schedule.max_steps = "
            f"{config.schedule.max_steps} to the policy; lower it"
        )


def check_leases(broker: BrokerSection) -> None:
    if broker.renew_s >= broker.lease_s:
        raise ConfigError(
            f"key 'broker.renew_s' = {broker.renew_s} is not below broker.lease_s = {broker.lease_s}; "
            "a lease would end before its renewal: lower renew_s"
        )


def check_reward(config: Config) -> None:
    reward, budget = config.reward, config.sampling.max_response_tokens
    if reward.overlong_buffer_tokens > budget:
        raise ConfigError(
            f"key 'reward.overlong_buffer_tokens' = {reward.overlong_buffer_tokens} is more than "
            f"sampling.max_response_tokens = {budget}; use a part of it"
        )
    if reward.code_memory_mb > reward.memory_mb:
        raise ConfigError(
            f"key 'reward.code_memory_mb' = {reward.code_memory_mb} is more than reward.memory_mb = "
            f"{reward.memory_mb}, within which programs run; raise that"
        )
    for name in reward.allowed:
        registry_of("reward.name").check_name(name, "reward.allowed")
    if reward.url and not re.match(r"https?://[^/\s]", reward.url):
        raise ConfigError(f"key 'reward.url' = {reward.url!r} is no address; give it as http://HOST:PORT/PATH")
    try:
        re.compile(reward.format_pattern)
    except re.error as error:
        raise ConfigError(
            f"key 'reward.format_pattern' = {reward.format_pattern!r} is no regular expression ({error}); mend it"
        ) from None


def check_environment(environment: EnvironmentSection) -> None:
    ends = environment.turn_ends or environment.max_turn_tokens is not None
    if environment.name and not ends:
        raise ConfigError(
            f"key 'environment.name' = {environment.name!r} is never asked, since nothing ends a turn; set "
            "environment.turn_ends or environment.max_turn_tokens"
        )
    if ends and not environment.name:
        raise ConfigError(
            f"key 'environment.turn_ends' = {environment.turn_ends!r} ends turns that nothing answers; set "
            "environment.name, or leave the section out"
        )


def check_agent(config: Config) -> None:
    agent = config.agent
    if not agent.is_set:
        return
    ways = [f"agent.{key} = {value!r}" for key in ("program", "command", "attach") if (value := getattr(agent, key))]
    if len(ways) > 1:
        key, _, value = ways[0].partition(" = ")
        raise ConfigError(f"key {key!r} = {value} goes beside {' and '.join(ways[1:])}; keep one of them")
    if config.environment.name:
        raise ConfigError(
            f"key 'environment.name' = {config.environment.name!r} answers the policy where an agent does; leave out "
            "[environment] or [agent]"
        )
    if config.data.source == "submitted":
        raise ConfigError(
            "key 'data.source' = 'submitted' brings token ids, and an agent says itself what the policy is told; "
            "give its tasks in data.path"
        )
    check_listening(agent)


def check_model(config: Config) -> None:
    if not (config.model.path / "config.json").is_file():
        path, mend = config.model.path, "give one, or make the quickstart's with `april make-policy`"
        name = "/".join(path.parts[-2:])
        typed_alone = not path.parent.exists() and path.parent.parent.exists()
        if re.fullmatch(HUB_NAME, name) and typed_alone:
            mend += (
                f"; a run downloads nothing: if {name} is a name of the hub, fetch it with `hf download {name} "
                f"--local-dir models/{path.name}` and give that folder"
            )
        raise ConfigError(
            f"key 'model.path' = {str(path)!r} is not a Hugging Face model folder (no config.json); {mend}"
        )
    try:
        room = config.longest_prompt_tokens
    except (OSError, ValueError, AttributeError):
        raise ConfigError(
            f"key 'model.path' = {str(config.model.path)!r} has a config.json that is not a JSON object; "
            "give a whole Hugging Face folder"
        ) from None
    if room < 1:
        raise ConfigError(
            f"key 'sampling.max_response_tokens' = {config.sampling.max_response_tokens} leaves no room for a prompt "
            f"in the model's context of {config.context_tokens} tokens; lower it"
        )


def check_data(data: DataSection) -> None:
    if data.source == "submitted" and data.epochs:
        raise ConfigError(
            f"key 'data.epochs' = {data.epochs} counts passes over files, and with data.source = 'submitted' the "
            "trainer brings the prompts; leave one out"
        )
    if data.source == "files" and bool(data.path) == bool(data.sources):
        if not data.path:
            raise ConfigError("key 'data.path' is missing; set it in the file or with --data.path VALUE")
        raise ConfigError(
            f"key 'data.path' = {str(data.path)!r} goes beside data.sources; make it one of them, or leave one out"
        )
    paths = [("data.path" if data.path else "data.sources", source.path) for source in data.train_sources]
    for key, path in [*paths, ("data.eval_path", data.eval_path)]:
        if path is not None and not path.exists():
            raise ConfigError(
                f"key {key!r} = {str(path)!r} does not exist; give a file or folder of prompts, or make the "
                "quickstart's with `april make-data`"
            )


def check_engine(config: Config) -> None:
    """Refuse what the engine cannot do, or cannot do rightly; what that is, the engine says."""
    engine = registry_of("worker.engine").find(config.worker.engine)
    check_supports(config)
    drawn = [(f"{one.key}.{key}", getattr(one, key)) for one in config.evaluation_sets for key in ("top_k", "top_p")]
    drawn += [("evaluation.top_k", config.evaluation.top_k), ("evaluation.top_p", config.evaluation.top_p)]
    for key, value in drawn:
        whole = 0 if key.endswith("top_k") else 1.0
        if value != whole and not engine.cuts:
            raise ConfigError(
                f"key '{key}' = {value} cuts the distribution, which worker.engine = "
                f"{config.worker.engine!r} does not do; use {whole}"
            )
    if config.engine.pace and "pace" not in engine.reads:
        engines = registry_of("worker.engine").those(lambda entry: "pace" in entry.reads)
        raise ConfigError(
            f"key 'engine.pace' = {config.engine.pace!r} means nothing to worker.engine = {config.worker.engine!r}, "
            f"which runs as fast as it can; use {engines}, or leave it out"
        )
    engine.check(config)
    check_divided(config)
    check_bringing(config)
    transports = registry_of("weights.transport")
    if engine.broadcasts_to_servers(config) and not transports.find(config.weights.transport).takes_servers:
        raise ConfigError(
            f"key 'weights.transport' = {config.weights.transport!r} takes no servers into its lanes, which "
            f"engine.weights = {config.engine.weights!r} wants; use "
            f"{transports.those(lambda transport: transport.takes_servers)}, or another engine.weights"
        )


def check_bringing(config: Config) -> None:
    """Refuse weights that others load where they cannot reach what takes them."""
    if not is_shipped(config, "weights.transport"):
        return
    if registry_of("weights.transport").find(config.weights.transport).brings:
        return
    engines = registry_of("worker.engine")
    if not engines.find(config.worker.engine).adopts:
        raise ConfigError(
            f"key 'weights.transport' = {config.weights.transport!r} leaves it to others to load weights, who cannot "
            f"reach those of worker.engine = {config.worker.engine!r}; use {engines.those(lambda one: one.adopts)}"
        )
    if not config.engine.url:
        raise ConfigError(
            f"key 'weights.transport' = {config.weights.transport!r} leaves it to others to load weights, who do not "
            "know the servers that a worker starts; give theirs in engine.url"
        )
    if config.engine.pause != "abort":
        raise ConfigError(
            f"key 'engine.pause' = {config.engine.pause!r} keeps requests in servers whose weights others change; use "
            "'abort'"
        )
