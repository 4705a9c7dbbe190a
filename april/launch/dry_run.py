"""`april run --dry-run`: describes what a configuration would start, and the resources that it needs."""

from collections.abc import Sequence

from april.broker.filters import zero_spread
from april.broker.plan import advice, describe_plan
from april.config import Config, ConfigError, SourceSection
from april.config.advantages import needs_critic
from april.config.broker import IPC
from april.config.checks import check_model
from april.data.dataset import verifier_of
from april.launch.devices import (
    assign_devices,
    describe_placement,
    memory_here,
    needed_devices,
    numa_nodes,
    place_parts,
)
from april.launch.findings import LABEL_WIDTH
from april.launch.memory import WEIGHT_BYTES, ModelShape, adapter_parameters, read_shape, states_bytes
from april.util.text import counted, format_bytes
from april.workers.engines import ENGINES
from april.workers.engines.entry import devices_wanted

JOURNAL_BYTES = 8
"""Journal bytes per token: its id and its log-probability."""


def describe(config: Config, devices: Sequence[str]) -> str:
    """Lines of a dry run's description: processes, devices, memory, weight channels and more. `devices`: names of the
    accelerators of this machine."""
    placed = devices_by_part(config, devices)
    schedule, shape = config.schedule, read_shape(config.model.path)
    token_bytes = JOURNAL_BYTES + (4 * (1 + config.sampling.top_k) if config.sampling.is_cut else 0)
    longest_bytes = config.sampling.max_response_tokens * token_bytes
    samples = schedule.rollout_batch_size * schedule.n_samples_per_prompt
    lines = {
        "run": f"{config.run_dir}, seed {config.seed}",
        "model": describe_model(config, shape),
        "data": "; ".join(describe_source(each, config.reward.name) for each in config.data.train_sources)
        or "prompts that the trainer submits",
        **describe_conversations(config),
        "held out": describe_evaluation(config),
        "schedule": describe_plan(schedule).removeprefix("plan: ").replace("\n      ", "; "),
        "filters": describe_filters(config),
        "processes": describe_processes(config),
        "devices": indented([describe_devices(config, placed), *describe_placement(placed, numa_nodes(devices))]),
        "learner": f"{samples} samples a step, {samples // config.learner.data_ranks} a rank; "
        f"{describe_training(config, shape)}",
        "fits": describe_fit(config, devices),
        "engines": f"{config.worker.engine}, {config.worker.slots} slots each; {describe_engine(config, shape)}",
        "ports": describe_ports(config),
        "channels": describe_channels(config, shape, placed),
        "links": indented(describe_groups(config)),
        "journal": f"up to {format_bytes(samples * longest_bytes)} a step",
        "advice": advice(config),
    }
    return "\n".join(f"{label:{LABEL_WIDTH}}{text}" for label, text in lines.items() if text)


def indented(lines: list[str]) -> str:
    return ("\n" + " " * LABEL_WIDTH).join(lines)


def describe_filters(config: Config) -> str:
    dynamic = [zero_spread.__name__] if config.schedule.dynamic_sampling else []
    return ", ".join([*dynamic, *filter(None, [config.schedule.group_filter])]) or "none"


def describe_processes(config: Config) -> str:
    workers, scorers, section = config.worker.count, config.scorers, config.environment
    parts = [
        (1, "broker", ""),
        (workers, "worker", ""),
        (scorers, "scorer", ""),
        (config.learner.ranks, "learner rank", ""),
        ((scorers or workers) * config.reward.processes, "verifier process", "verifier processes"),
        (workers * section.processes if section.name else 0, "environment", ""),
        (config.agents, "agents process", "agents processes"),
    ]
    of_sessions = f" of {counted(config.agent.sessions, 'session')}" if config.agents else ""
    return ", ".join(counted(*part) for part in parts if part[0]) + of_sessions


def describe_model(config: Config, shape: ModelShape | None) -> str:
    if shape is None:
        return f"{config.model.named()}, of unknown size"
    return f"{config.model.named()}, {count_of(shape.parameters)} parameters, context {shape.context} tokens"


def count_of(parameters: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if parameters >= unit:
            return f"{parameters / unit:.2f} {name}"
    return str(parameters)


def describe_source(source: SourceSection, verifier: str) -> str:
    """A line about a source of prompts. `verifier`: name of the run's default verifier (`reward.name`)."""
    weight = "" if source.weight == 1 else f", {source.weight:g} times an epoch"
    budget = f", at most {source.max_response_tokens} tokens a response" if source.max_response_tokens else ""
    split = f" ({', '.join(filter(None, (source.configuration, source.split)))})" if source.split else ""
    scored = f", rewarded by {verifier_of(source) or verifier}"
    return f"{source.named()}{split} as {source.mapping}{weight}{scored}{budget}"


def describe_conversations(config: Config) -> dict[str, str]:
    """{"beside": one line about all sources of kind sft}, the line's label and text; {} if there are no such
    sources."""
    lines = [
        f"{source.sft_rows} rows of {source.named()} a batch, {source.sft_weight:g} times their loss"
        for source in config.data.sft_sources.values()
    ]
    return {"beside": "; ".join(lines)} if lines else {}


def describe_evaluation(config: Config) -> str:
    if not config.evaluation_sets:
        return "none"
    every = f"every {config.evaluation.every} steps" if config.evaluation.every else "at the start and at the end"
    sets = [
        f"{f'{dataset.name}, ' if dataset.number else ''}{dataset.source.named()}, {dataset.prompts} prompts at most"
        for dataset in config.evaluation_sets
    ]
    return f"{'; '.join(sets)}, {every}"


def describe_devices(config: Config, placed: dict[str, list[str]]) -> str:
    ranks, per_worker = devices_wanted(config)
    if not placed:
        return "none here: learner and workers compute on the CPU" if ranks or per_worker else "no accelerator"
    for_workers = config.worker.count * per_worker
    parts = [f"{count} {name}" for count, name in ((for_workers, "for workers"), (ranks, "for the learner")) if count]
    shared = " that share them" if config.devices.share and len(parts) > 1 else ""
    return f"{counted(needed_devices(config), 'accelerator')}: {', '.join(parts)}{shared}"


def describe_ports(config: Config) -> str:
    """Listening addresses of the parts on this machine. * and 0 stand for any free port, which weight channels always
    use."""
    servers = f"{config.engine.port} and up" if config.engine.port else ""
    opened = {
        "broker": "" if config.broker.bind == IPC else config.broker.bind.removeprefix("tcp://"),
        "metrics": config.operations.http.removesuffix(":0")
        + " at a free port" * config.operations.http.endswith(":0"),
        "agents": config.agent.listen if config.agents else "",
        "servers": servers,
        "learner ranks": str(config.launch.port + 1) if config.launch.learner_nodes > 1 else "",
    }
    return ", ".join(f"{name} {address}" for name, address in opened.items() if address)


def devices_by_part(config: Config, devices: Sequence[str]) -> dict[str, list[str]]:
    """Accelerators by part, out of `devices`, this machine's; if these are too few, out of as many as needed, numbered
    from 0."""
    try:
        return place_parts(config, devices)
    except ConfigError:
        return assign_devices(config, list(map(str, range(needed_devices(config)))))


def describe_training(config: Config, shape: ModelShape | None) -> str:
    if shape is None:
        return "memory unknown without the model"
    try:
        states = states_bytes(config, shape)
        trained = adapter_parameters(config) if config.lora.is_set else 0
    except ConfigError:
        return "memory unknown with an adapter that does not fit the model"
    adapter = (
        f"{count_of(trained)} trained parameters, {trained / shape.parameters:.1%} of the model's; " if trained else ""
    )
    if needs_critic(config):
        adapter += "a critic of the model's size; "
    on_top = f"activations of {config.learner.microbatch_tokens} tokens on top"
    return f"{adapter}{format_bytes(states)} of weights, gradients and moments a rank, {on_top}"


def describe_engine(config: Config, shape: ModelShape | None) -> str:
    if shape is None:
        return "memory unknown without the model"
    prompt_tokens = 0 if config.agent.is_set else config.longest_prompt_tokens
    longest = config.sampling.max_response_tokens + prompt_tokens
    cache = shape.kv_bytes * longest * config.worker.slots
    return (
        f"{format_bytes(shape.parameters * WEIGHT_BYTES)} of weights, "
        f"{format_bytes(shape.kv_bytes * 1024)} of cache for 1024 tokens, "
        f"{format_bytes(cache)} if all slots are at {longest} tokens"
    )


def describe_fit(config: Config, devices: Sequence[str]) -> str:
    """Text on whether the run fits this machine's accelerators (`devices`): the memory that it needs on one, and
    changes that would make it fit; or why that is not known. "" with `devices.share`, which has a line of its own."""
    if config.devices.share:
        return ""
    if not devices:
        return "`april plan CONFIG --gpu GIB` says whether it fits accelerators of so much memory"
    try:
        from april.launch import plan
        from april.learner.loading import ModelError
    except ImportError as error:
        return f"not known without {error.name}"
    try:
        check_model(config)
        return indented(plan.describe(config, min(memory_here()))[0].splitlines())
    except (ConfigError, ModelError) as error:
        return f"not known: {error}"


def describe_channels(config: Config, shape: ModelShape | None, placed: dict[str, list[str]]) -> str:
    engine, channels = ENGINES.find(config.worker.engine), weight_channels(config)
    ends = "worker" if len(channels) == config.worker.count else "server"
    backend: str = config.weights.backend
    if backend == "auto":
        backend = "nccl" if placed and all(devices_wanted(config)) and not config.devices.share else "gloo"
        if config.engine.url and engine.broadcasts_to_servers(config):
            backend = "what its device takes"
    sent = f", {format_bytes(shape.parameters * WEIGHT_BYTES)} each" if shape else ""
    return f"{len(channels)}: learner rank 0 to each {ends} over {backend}{sent} at every step"


def describe_groups(config: Config) -> list[str]:
    """One line per weight channel: its process group and the rank of each member."""
    engine = ENGINES.find(config.worker.engine)
    return [f"{channel}: {engine.describe_channel(config)}" for channel in weight_channels(config)]


def weight_channels(config: Config) -> list[str]:
    """Names of the weight channels of all workers."""
    engine, names = ENGINES.find(config.worker.engine), (f"worker-{index}" for index in range(config.worker.count))
    return [channel for name in names for channel in engine.weight_channels(config, name)]
