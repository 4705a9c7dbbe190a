"""What a configuration would start, what that needs, and what is missing of it: `april run ... --dry-run`."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from april.broker.plan import advice, describe_plan
from april.broker.telemetry.alarm import check_alarms
from april.broker.telemetry.sink import check_sinks
from april.config import Config, ConfigError, SourceSection
from april.config.checks import check_engine, check_model, check_schedule
from april.data.dataset import verifier_of
from april.data.formats import ARROW, PARQUET, data_files, kind_of
from april.environments import ENVIRONMENTS
from april.filters.filters import GroupFilters, zero_spread
from april.launch import TARGETS
from april.launch.devices import describe_placement, lay_out, place, visible_devices
from april.launch.preflight import check_keys, check_learner_parts, check_weights, unused_roles
from april.weights import TRANSPORTS
from april.workers.engines import ENGINES
from april.workers.engines.devices import wanted
from april.workers.rewards.verifiers import check_verifier

GIB = 1 << 30
STATE_BYTES = 16
"""of a parameter in training: weight, gradient and two moments of AdamW, in float32"""
WEIGHT_BYTES = 2
"""of a parameter in an engine and on its way there, bfloat16"""
JOURNAL_BYTES = 8
"""of a token, its id and its log-probability"""
LABEL_WIDTH = 11
NO_REPORT = "none without matplotlib; `pip install 'april-rl[report]'`"


@dataclass(frozen=True)
class Shape:
    """What a model's config.json says of a Qwen or Llama."""

    parameters: int
    kv_bytes: int
    """of a token in an engine's cache, bfloat16"""
    context: int


def read_shape(folder: Path) -> Shape | None:
    """None where there is no such file, or one of another kind of model."""
    try:
        config = json.loads((folder / "config.json").read_text())
        hidden, layers, heads = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        vocabulary, inner, context = (
            config[key] for key in ("vocab_size", "intermediate_size", "max_position_embeddings")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    head = config.get("head_dim") or hidden // heads
    kv_width, query_width = config.get("num_key_value_heads", heads) * head, heads * head
    attention = 2 * hidden * query_width + 2 * hidden * kv_width
    if config.get("model_type") == "qwen2":
        attention += query_width + 2 * kv_width
    if config.get("model_type") == "qwen3":
        attention += 2 * head
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    parameters = embeddings + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden
    return Shape(parameters, 2 * layers * kv_width * WEIGHT_BYTES, context)


def describe(config: Config) -> str:
    """Processes, ranks, devices, memory and weight lanes, a line each."""
    schedule, shape = config.schedule, read_shape(config.model.path)
    token_bytes = JOURNAL_BYTES + (4 * (1 + config.sampling.top_k) if config.sampling.is_cut else 0)
    longest_bytes = config.sampling.max_response_tokens * token_bytes
    samples = schedule.rollout_batch_size * schedule.n_samples_per_prompt
    lines = {
        "run": f"{config.run_dir}, seed {config.seed}",
        "model": describe_model(config, shape),
        "data": "; ".join(map(describe_source, config.data.train_sources)),
        "held out": describe_evaluation(config),
        "schedule": describe_plan(schedule).removeprefix("plan: ").replace("\n      ", "; "),
        "filters": describe_filters(config),
        "processes": describe_processes(config),
        "devices": indented([describe_devices(config), *describe_placement(planned(config))]),
        "learner": f"{samples} samples a step, {samples // config.learner.ranks} a rank; {training(config, shape)}",
        "engines": f"{config.worker.engine}, {config.worker.slots} slots each; {engine(config, shape)}",
        "lanes": describe_lanes(config, shape),
        "groups": indented(describe_groups(config)),
        "journal": f"up to {size(samples * longest_bytes)} a step",
        "report": "" if importlib.util.find_spec("matplotlib") else NO_REPORT,
        "advice": advice(config),
    }
    return "\n".join(f"{label:{LABEL_WIDTH}}{text}" for label, text in lines.items() if text)


def indented(lines: list[str]) -> str:
    return ("\n" + " " * LABEL_WIDTH).join(lines)


def describe_filters(config: Config) -> str:
    dynamic = [zero_spread.__name__] if config.schedule.dynamic_sampling else []
    return ", ".join([*dynamic, *filter(None, [config.schedule.group_filter])]) or "none"


def describe_processes(config: Config) -> str:
    workers, scorers, ranks = config.worker.count, config.scorers, config.learner.ranks
    scoring = f"{scorers} scorers, " if scorers else ""
    verifiers = (scorers or workers) * config.reward.processes
    environments = f", {workers * config.environment.processes} environments" if config.environment.name else ""
    agents = f", {config.agents} agents processes of {config.agent.sessions} sessions" if config.agents else ""
    return f"1 broker, {workers} workers, {scoring}{ranks} learner ranks, {verifiers} verifiers{environments}{agents}"


def describe_model(config: Config, shape: Shape | None) -> str:
    if shape is None:
        return f"{config.model.path}, of unknown size"
    return f"{config.model.path}, {count_of(shape.parameters)} parameters, context {shape.context} tokens"


def count_of(parameters: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if parameters >= unit:
            return f"{parameters / unit:.2f} {name}"
    return str(parameters)


def describe_source(source: SourceSection) -> str:
    weight = "" if source.weight == 1 else f", {source.weight:g} times an epoch"
    return f"{source.path} as {source.mapping}{weight}, rewarded by {verifier_of(source) or 'reward.name'}"


def describe_evaluation(config: Config) -> str:
    if not config.data.eval_path:
        return "none"
    every = f"every {config.evaluation.every} steps" if config.evaluation.every else "at the start and at the end"
    return f"{config.data.eval_path}, {config.evaluation.prompts} prompts at most, {every}"


def describe_devices(config: Config) -> str:
    ranks, each = wanted(config)
    for_workers = config.worker.count * each
    parts = [f"{count} {name}" for count, name in ((for_workers, "for workers"), (ranks, "for the learner")) if count]
    return f"{ranks + for_workers} accelerators: {', '.join(parts)}" if parts else "no accelerator"


def planned(config: Config) -> dict[str, list[str]]:
    """By part, of those that are here, or of as many as are wanted where these cannot be placed."""
    try:
        placed = place(config, visible_devices())
    except ConfigError:
        placed = {}
    ranks, each = wanted(config)
    return placed or lay_out(config, list(map(str, range(ranks + config.worker.count * each))))


def training(config: Config, shape: Shape | None) -> str:
    if shape is None:
        return "memory unknown without the model"
    states = shape.parameters * STATE_BYTES // config.learner.ranks
    on_top = f"activations of {config.learner.microbatch_tokens} tokens on top"
    return f"{size(states)} of weights, gradients and moments a rank, {on_top}"


def engine(config: Config, shape: Shape | None) -> str:
    if shape is None:
        return "memory unknown without the model"
    prompt_tokens = 0 if config.agent.is_set else config.longest_prompt_tokens
    longest = config.sampling.max_response_tokens + prompt_tokens
    cache = shape.kv_bytes * longest * config.worker.slots
    return (
        f"{size(shape.parameters * WEIGHT_BYTES)} of weights, {size(shape.kv_bytes * 1024)} of cache for 1024 tokens, "
        f"{size(cache)} if all slots are at {longest} tokens"
    )


def describe_lanes(config: Config, shape: Shape | None) -> str:
    engine = ENGINES.find(config.worker.engine)
    lanes = [lane for index in range(config.worker.count) for lane in engine.lanes(config, f"worker-{index}")]
    ends = "worker" if len(lanes) == config.worker.count else "server"
    backend: str = config.weights.backend
    if backend == "auto":
        backend = "nccl" if all(wanted(config)) else "gloo"
        if config.engine.url and engine.broadcasts_to_servers(config):
            backend = "what its device takes"
    sent = f", {size(shape.parameters * WEIGHT_BYTES)} each" if shape else ""
    return f"{len(lanes)}: learner rank 0 to each {ends} over {backend}{sent} at every step"


def describe_groups(config: Config) -> list[str]:
    """Who is in which weight group under which rank; a line for each lane."""
    engine = ENGINES.find(config.worker.engine)
    lanes = [lane for index in range(config.worker.count) for lane in engine.lanes(config, f"worker-{index}")]
    return [f"{lane}: {engine.describe_lane(config)}" for lane in lanes]


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


# --- what is missing ----------------------------------------------------------------------------------------


def missing(config: Config) -> list[str]:
    """Everything that keeps the run from starting here, a sentence each."""
    return list(objections(config))


def objections(config: Config) -> Iterator[str]:
    data = config.data
    yield from refused(check_model, config)
    if (config.model.path / "config.json").is_file():
        yield from refused(check_weights, config)
    if not data.train_sources:
        yield "no training prompts: set data.path"
    for source in (*data.train_sources, *data.eval_sources):
        yield from refused(check_source, source)
    named = {verifier_of(source) for source in (*data.train_sources, *data.eval_sources)} | {config.reward.name}
    for name in sorted(filter(None, named)):
        yield from refused(check_verifier, name, "reward.name or data.reward", config.reward.url)
    if config.environment.name:
        yield from refused(ENVIRONMENTS.find, config.environment.name)
    yield from refused(TARGETS.find, config.run.target)
    yield from refused(TRANSPORTS.find, config.weights.transport)
    yield from refused(GroupFilters, config.schedule)
    yield from refused(check_sinks, config.operations.sinks)
    yield from refused(check_alarms, config.operations.alarms)
    yield from refused(check_keys, config.security.keys, unused_roles(config))
    yield from refused(check_engine, config)
    yield from refused(check_schedule, config.schedule)
    yield from refused(check_learner_parts, config.algorithm)
    yield from lacking_devices(config)


def refused(check: Callable, *arguments) -> Iterator[str]:
    try:
        check(*arguments)
    except ConfigError as error:
        yield str(error)


def check_source(source: SourceSection) -> None:
    """Raises ConfigError unless its files are there and can be read here."""
    if not source.path.exists():
        raise ConfigError(f"data {source.path} is not there; put the dataset's files into that place")
    files = data_files(source.path)
    for file in files:
        if not file.is_file():
            raise ConfigError(f"data {file} is not there; copy the dataset again")
    if any(kind_of(file) in (PARQUET, ARROW) for file in files) and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"data {source.path} needs pyarrow; `pip install 'april-rl[data]'`")


def lacking_devices(config: Config) -> Iterator[str]:
    """`auto` is content with none."""
    if importlib.util.find_spec("torch") is None:
        yield "torch is not installed; `pip install 'april-rl[learner,worker]'`"
    else:
        yield from refused(place, config, visible_devices())
