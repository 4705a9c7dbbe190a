"""Checks that keys fit together. Each raises a ConfigError that names key, value and fix."""

from collections.abc import Collection

from april.config.addresses import check_addresses, check_listening, check_store_url
from april.config.advantages import check_advantage, check_compared, check_critic
from april.config.algorithms import divided, told_of_source, used_algorithms
from april.config.broker import BrokerSection
from april.config.data import DataSection, SourceSection
from april.config.evaluation import check_evaluation, check_set_paths
from april.config.rewards import check_reward
from april.config.schedule import ScheduleSection
from april.config.sections import Config
from april.config.sharing import check_memory_division, check_sharing, check_time_sharing
from april.config.teachers import check_teachers
from april.config.training import AlgorithmSection, check_lora
from april.config.weights import check_external_weights, check_snapshots, check_transport
from april.config.workers import EnvironmentSection
from april.util.errors import ConfigError, refuse, toml_like
from april.util.registry import REGISTRIES, registry_of
from april.wire.limits import MAX_TOP_K

BANDS = [
    key.removesuffix("_low") for key in AlgorithmSection.model_fields if key.endswith("_low") and key != "clip_low"
]
"""Stems NAME of the pairs of `[algorithm]` keys (NAME_low, NAME_high) that bound a range; the clip range is checked
apart."""
INPUTS = ("model", "data")
"""Inputs of a run whose existence `check` checks by default: the model's folder ("model") and all data files ("data").
A process can name fewer, since its machine may lack what it does not read. "conversations" stands for the files of
sources of kind sft alone, which the learner reads."""

PROMPTS_ALONE = ("reward", "teacher", "hint_key", "algorithm", "max_response_tokens")
"""Keys of `[[data.sources]]` that mean nothing for a source of kind sft."""
SFT_ALONE = ("sft_rows", "sft_weight")
"""Keys of `[[data.sources]]` that mean nothing for a source of prompts."""


def check(config: Config, inputs: Collection[str] = INPUTS) -> None:
    """Refuse keys that are valid one by one but do not fit together, and missing `inputs`.

    This function does not import the user's own parts, named as `package.module:Name`, since some processes of a run
    may lack them. `april.launch.check` checks them, and so does each process that uses one.
    """
    check_schedule(config.schedule, imported=config.is_shipped("schedule.kind"))
    check_minibatches(config)
    check_sampling(config)
    check_budgets(config)
    check_evaluation(config.evaluation, config.evaluation_sets)
    check_algorithms(config)
    check_lora(config.lora, config.learner.master_weights)
    check_store_url("learner.checkpoint_store", config.learner.checkpoint_store)
    check_snapshots(config)
    check_sharing(config)
    backend = config.shipped_part("learner.backend")
    if backend:
        backend.check(config)
    check_time_sharing(config, config.shipped_part("schedule.kind"), backend)
    check_addresses(config)
    check_leases(config.broker)
    check_reward(config.reward, config.sampling.max_response_tokens)
    check_environment(config.environment)
    check_agent(config)
    check_teachers(config)
    check_revisions(config)
    if "model" in inputs:
        check_model(config)
    if "data" in inputs:
        check_data(config.data)
        check_set_paths(config.evaluation_sets)
    if "data" in inputs or "conversations" in inputs:
        check_sft_sources(config.data)
    if config.is_shipped("worker.engine"):
        check_engine(config)


def check_names(config: Config) -> None:
    """Refuse names of parts that are neither shipped nor of the form `package.module:Name`."""
    for key in REGISTRIES:
        for name in config.part_names(key):
            registry_of(key).check_name(name)


def check_schedule(schedule: ScheduleSection, imported: bool = True) -> None:
    """Refuse a `[schedule]` that the ledger cannot carry out; if `imported`, also one that the schedule registered as
    `schedule.kind` refuses. `imported`: whether that schedule, perhaps a user's own, is imported for this."""
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
        refuse(
            "schedule.over_sampling_batch_size",
            per_round,
            f"exceeds {admitted}, the most that schedule.max_staleness = {schedule.max_staleness} allows "
            f"for N = {groups}{' with overlap' if schedule.overlap else ''}",
            "lower it or raise max_staleness",
        )
    if schedule.min_group_size and schedule.min_group_size > n:
        refuse("schedule.min_group_size", schedule.min_group_size, f"exceeds n = {n}", f"use a value from 1 to {n}")


def check_automatic(schedule: ScheduleSection, wanted: str | None) -> None:
    """Refuse the value `auto` for any key of `[schedule]` but `wanted`, the only one for which April can choose a value
    with this `schedule.kind` (None: there is no such key)."""
    key = schedule.automatic_key
    if wanted is None:
        kinds = registry_of("schedule.kind").names_where(lambda kind: kind.dial)
        refuse(
            f"schedule.{key}",
            "auto",
            f"has nothing to choose where schedule.kind = {schedule.kind!r}",
            f"use schedule.kind = {kinds}, or leave the key out",
        )
    if key != wanted:
        refuse(
            f"schedule.{key}",
            "auto",
            f"is not what schedule.kind = {schedule.kind!r} goes by",
            f"set schedule.{wanted} = 'auto'",
        )


def check_minibatches(config: Config) -> None:
    if config.learner.minibatches > config.schedule.rollout_batch_size:
        refuse(
            "learner.minibatches",
            config.learner.minibatches,
            f"is more than the {config.schedule.rollout_batch_size} groups of a batch, each of which is in "
            "one minibatch",
            "set it to at most schedule.rollout_batch_size",
        )


def check_sampling(config: Config) -> None:
    """Refuse truncated sampling of training samples if a shipped engine does not return each token's support (the ids
    that it was drawn from), or if `sampling.top_k` does not bound the supports."""
    if not config.sampling.is_cut:
        return
    if config.is_shipped("worker.engine"):
        check_supports(config)
    if config.sampling.top_k < 2:
        key, value = first_cut_key(config)
        refuse(
            f"sampling.{key}",
            value,
            "does not bound what travels with every token, the ids that it was drawn from",
            f"set sampling.top_k from 2 to {MAX_TOP_K}",
        )


def check_supports(config: Config) -> None:
    """Refuse truncated sampling with an engine that does not return each token's support (the ids that it was drawn
    from)."""
    engines = registry_of("worker.engine")
    if config.sampling.is_cut and not engines.find(config.worker.engine).returns_supports:
        key, value = first_cut_key(config)
        others = engines.names_where(lambda engine: engine.returns_supports)
        refuse(
            f"sampling.{key}",
            value,
            f"cuts the distribution, and worker.engine = {config.worker.engine!r} does not say what is "
            "left of it, without which training would be biased",
            f"set worker.engine = {others}, or use top_k = 0, top_p = 1.0 and min_p = 0.0",
        )


def first_cut_key(config: Config) -> tuple[str, float]:
    """(key, value) of the first of top_k, top_p and min_p in `[sampling]` that truncates the distribution; at least one
    of them must do so."""
    whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    sampling = config.sampling
    return next((key, getattr(sampling, key)) for key in whole if getattr(sampling, key) != whole[key])


def check_algorithm(algorithm: AlgorithmSection, imported: bool = True) -> None:
    """Refuse keys of `[algorithm]` that do not fit together. `imported`: whether user-defined parts are imported and
    checked too; otherwise only shipped parts are checked."""
    registry, losses = registry_of("algorithm.corrections"), registry_of("algorithm.loss")
    asked = [name for name in algorithm.corrections if imported or name in registry.shipped]
    weighing = [name for name in asked if getattr(registry.find(name), "weighs", False)]
    if weighing and algorithm.proximal == "behaviour":
        refuse(
            "algorithm.corrections",
            list(algorithm.corrections),
            f"holds {weighing[0]!r}, which weighs 1 around the behaviour policy",
            "set algorithm.proximal = 'recomputed' or 'interpolated', or leave it out",
        )
    if len(weighing) > 1 or len(set(algorithm.corrections)) < len(algorithm.corrections):
        refuse(
            "algorithm.corrections",
            list(algorithm.corrections),
            "applies the same ratio twice",
            "name each correction once, and only one of "
            f"{registry.names_where(lambda found: getattr(found, 'weighs', False))}",
        )
    if algorithm.dual_clip is not None and (imported or algorithm.loss in losses.shipped):
        suitable = losses.names_where(lambda loss: getattr(loss, "takes_dual_clip", False))
        if not getattr(losses.find(algorithm.loss), "takes_dual_clip", False):
            refuse(
                "algorithm.dual_clip",
                algorithm.dual_clip,
                f"is for algorithm.loss = {suitable}, not {algorithm.loss!r}",
                "leave it out",
            )
    if algorithm.constant_tokens is not None and algorithm.normalisation != "constant":
        refuse(
            "algorithm.constant_tokens",
            algorithm.constant_tokens,
            f"is for algorithm.normalisation = 'constant', not {algorithm.normalisation!r}",
            "leave it out",
        )
    for band in BANDS:
        low, high = getattr(algorithm, f"{band}_low"), getattr(algorithm, f"{band}_high")
        if low >= high:
            refuse(
                f"algorithm.{band}_low",
                low,
                f"is not below algorithm.{band}_high = {high}, so every token would be masked",
                "lower it",
            )


def check_algorithms(config: Config, imported: bool = False) -> None:
    """Refuse keys of `[algorithm]`, or of a source's own algorithm, that do not fit together or with other sections.
    `imported`: whether user-defined parts are imported and checked too; otherwise only shipped parts are checked."""
    configs = divided(config)
    if len(configs) > 1 and config.data.source == "submitted":
        why = "brings prompts of no source, and data.sources have algorithms of their own"
        refuse("data.source", "submitted", why, "leave one of them out")
    for number, each in configs.items():
        try:
            check_names(each)
            check_algorithm(each.algorithm, imported)
            if number is not None or "algorithm" in used_algorithms(config):
                check_compared(each, imported)
            check_advantage(each, imported)
        except ConfigError as error:
            raise ConfigError(told_of_source(number, str(error))) from None
    check_critic(config, imported)


def check_leases(broker: BrokerSection) -> None:
    if broker.renew_s >= broker.lease_s:
        refuse(
            "broker.renew_s",
            broker.renew_s,
            f"is not below broker.lease_s = {broker.lease_s}",
            "a lease would end before its renewal: lower renew_s",
        )


def check_environment(environment: EnvironmentSection) -> None:
    ends = environment.turn_ends or environment.max_turn_tokens is not None
    if environment.name and not ends:
        refuse(
            "environment.name",
            environment.name,
            "is never asked, since nothing ends a turn",
            "set environment.turn_ends or environment.max_turn_tokens",
        )
    if ends and not environment.name:
        refuse(
            "environment.turn_ends",
            environment.turn_ends,
            "ends turns that nothing answers",
            "set environment.name, or leave the section out",
        )


def check_agent(config: Config) -> None:
    agent = config.agent
    if not agent.is_set:
        return
    (key, value), *others = [
        (key, getattr(agent, key)) for key in ("program", "command", "attach") if getattr(agent, key)
    ]
    if others:
        also = " and ".join(f"agent.{other} = {toml_like(given)}" for other, given in others)
        refuse(f"agent.{key}", value, f"goes beside {also}", "keep one of them")
    if config.environment.name:
        refuse(
            "environment.name",
            config.environment.name,
            "answers the policy where an agent does",
            "leave out [environment] or [agent]",
        )
    if config.data.source == "submitted":
        refuse(
            "data.source",
            "submitted",
            "brings token ids, and an agent says itself what the policy is told",
            "give its tasks in data.path",
        )
    check_listening(agent)


def check_revisions(config: Config) -> None:
    """Refuse a revision where the path is not a repository on a hub."""
    for key, section in config.hub_sections.items():
        for prefix in section.prefixes:
            path, asked = getattr(section, f"{prefix}path"), getattr(section, f"{prefix}revision")
            if asked and path and path.is_absolute() and not getattr(section, f"{prefix}commit"):
                why = f"is of a repository on a hub, and {key}.{prefix}path = {str(path)!r} is a path"
                refuse(f"{key}.{prefix}revision", asked, why, "leave it out, or give the name of a repository")


SIZES = (
    *("vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
"""Keys of a model's config.json whose values are numbers, or lists with one for each layer."""


def check_model(config: Config) -> bool:
    """Refuse a model whose config.json is missing, malformed, or leaves no room for a prompt; otherwise returns
    True."""
    if not (config.model.path / "config.json").is_file():
        refuse(
            "model.path",
            config.model.path,
            "is not a Hugging Face model folder (no config.json)",
            "give one, or the name of a model on a hub, or make the quickstart's with `april make-policy`",
        )
    whole = "give a whole Hugging Face folder"
    try:
        shape = config.model_shape
    except OSError:
        shape = None
    if shape is None:
        refuse("model.path", config.model.path, "has a config.json that is not a JSON object", whole)
    for key in SIZES:
        size = shape.get(key)
        if isinstance(size, str | float | dict | bool) or (isinstance(size, int) and size < 0):
            refuse("model.path", config.model.path, f"has a config.json with {key} = {size!r}, which is no size", whole)
    if config.longest_prompt_tokens < 1:
        refuse(
            "sampling.max_response_tokens",
            config.sampling.max_response_tokens,
            f"leaves no room for a prompt in the model's context of {config.context_tokens} tokens",
            "lower it",
        )
    return True


def check_data(data: DataSection) -> None:
    if data.source == "submitted" and data.epochs:
        refuse(
            "data.epochs",
            data.epochs,
            "counts passes over files, and with data.source = 'submitted' the trainer brings the prompts",
            "leave one out",
        )
    if data.source == "files" and bool(data.path) == bool(data.sources):
        if not data.path:
            refuse("data.path", None, "is missing", "set it in the file or with --data.path VALUE")
        refuse("data.path", data.path, "goes beside data.sources", "make it one of them, or leave one out")
    paths = [("data.path" if data.path else "data.sources", source.path) for source in data.train_sources]
    for key, path in [*paths, ("data.eval_path", data.eval_path)]:
        if path is not None and not path.exists():
            refuse(
                key,
                path,
                "does not exist",
                "give a file or folder of prompts, the name of a dataset on a hub, or make the quickstart's with "
                "`april make-data`",
            )


def check_sft_sources(data: DataSection) -> None:
    """Refuse sources of kind sft without a source of prompts, or listed before one, and keys that the source's kind
    does not have."""
    found = data.sft_sources
    if found and data.source == "submitted":
        refuse("data.source", data.source, "leaves no place for data.sources", "train the conversations by yourself")
    if found and not data.prompt_sources:
        why = "are all of kind sft, and a run needs prompts"
        refuse("data.sources", sorted(found), why, "add a source of prompts, or run `april sft`")
    if found and min(found) < len(data.prompt_sources):
        why = "stands before a source of prompts"
        refuse(f"data.sources.{min(found)}.kind", "sft", why, "put sources of kind sft last")
    for number, source in enumerate(data.sources):
        others = PROMPTS_ALONE if source.kind == "sft" else SFT_ALONE
        for name in others:
            if (value := getattr(source, name)) != SourceSection.model_fields[name].default:
                why = f"is not for a source of kind {source.kind}"
                refuse(f"data.sources.{number}.{name}", value, why, "leave it out, or set the source's kind")
        if source.kind == "sft" and not source.path.exists():
            fix = "give a file or folder of conversations, here where rank 0 of the learner reads them"
            refuse(f"data.sources.{number}.path", source.path, "does not exist", fix)


def check_budgets(config: Config) -> None:
    """Refuse a source's response budget above `sampling.max_response_tokens`, or below
    `reward.overlong_buffer_tokens`."""
    most, buffer = config.sampling.max_response_tokens, config.reward.overlong_buffer_tokens
    for number, source in enumerate(config.data.sources):
        key, budget = f"data.sources.{number}.max_response_tokens", source.max_response_tokens
        if budget and budget > most:
            refuse(key, budget, f"is above sampling.max_response_tokens = {most}", "lower it")
        if budget and budget < buffer:
            refuse(key, budget, f"is below reward.overlong_buffer_tokens = {buffer}", "raise it, or lower that")


def check_engine(config: Config) -> None:
    """Refuse keys that the configured engine does not support, by the attributes and the `check` of its registry
    entry."""
    engine = registry_of("worker.engine").find(config.worker.engine)
    check_supports(config)
    truncations = [
        (f"{section.key}.{key}", getattr(section, key))
        for section in config.evaluation_sets
        for key in ("top_k", "top_p")
    ]
    truncations += [("evaluation.top_k", config.evaluation.top_k), ("evaluation.top_p", config.evaluation.top_p)]
    for key, value in truncations:
        whole = 0 if key.endswith("top_k") else 1.0
        if value != whole and not engine.truncates_sampling:
            refuse(
                key,
                value,
                f"cuts the distribution, which worker.engine = {config.worker.engine!r} does not do",
                f"use {whole}",
            )
    if config.engine.pace and "pace" not in engine.reads:
        engines = registry_of("worker.engine").names_where(lambda entry: "pace" in entry.reads)
        refuse(
            "engine.pace",
            config.engine.pace,
            f"means nothing to worker.engine = {config.worker.engine!r}, which runs as fast as it can",
            f"use {engines}, or leave it out",
        )
    engine.check(config)
    check_memory_division(config)
    check_external_weights(config)
    check_transport(config, engine)
