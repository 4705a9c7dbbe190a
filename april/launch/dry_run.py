"""What a configuration would start and what that needs: `april run ... --dry-run`."""

import importlib.util
from collections.abc import Sequence

from april.broker.plan import advice, describe_plan
from april.config import Config, ConfigError, SourceSection
from april.config.checks import needs_values
from april.data.dataset import verifier_of
from april.filters.filters import zero_spread
from april.launch.adapter import adapter_parameters
from april.launch.check import LABEL_WIDTH
from april.launch.devices import describe_placement, lay_out, needed_devices, numa_nodes, place
from april.launch.memory import states_bytes
from april.launch.shape import WEIGHT_BYTES, Shape, read_shape
from april.words import counted, size
from april.workers.engines import ENGINES
from april.workers.engines.devices import wanted

JOURNAL_BYTES = 8
"""of a token, its id and its log-probability"""
NO_REPORT = "none without matplotlib; `pip install 'april-rl[report]'`"


def describe(config: Config, devices: Sequence[str]) -> str:
    """Processes, ranks, devices, memory and weight lanes, a line each. `devices`: accelerators here, by name."""
    placed = planned(config, devices)
    schedule, shape = config.schedule, read_shape(config.model.path)
    token_bytes = JOURNAL_BYTES + (4 * (1 + config.sampling.top_k) if config.sampling.is_cut else 0)
    longest_bytes = config.sampling.max_response_tokens * token_bytes
    samples = schedule.rollout_batch_size * schedule.n_samples_per_prompt
    lines = {
        "run": f"{config.run_dir}, seed {config.seed}",
        "model": describe_model(config, shape),
        "data": "; ".join(map(describe_source, config.data.train_sources)) or "prompts that the trainer brings",
        "held out": describe_evaluation(config),
        "schedule": describe_plan(schedule).removeprefix("plan: ").replace("\n      ", "; "),
        "filters": describe_filters(config),
        "processes": describe_processes(config),
        "devices": indented([describe_devices(config, placed), *describe_placement(placed, numa_nodes(devices))]),
        "learner": f"{samples} samples a step, {samples // config.learner.ranks} a rank; {training(config, shape)}",
        "engines": f"{config.worker.engine}, {config.worker.slots} slots each; {engine(config, shape)}",
        "ports": describe_ports(config),
        "lanes": describe_lanes(config, shape, placed),
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
    workers, scorers, section = config.worker.count, config.scorers, config.environment
    parts = [
        (1, "broker", ""),
        (workers, "worker", ""),
        (scorers, "scorer", ""),
        (config.learner.ranks, "learner rank", ""),
        ((scorers or workers) * config.reward.processes, "verifier", ""),
        (workers * section.processes if section.name else 0, "environment", ""),
        (config.agents, "agents process", "agents processes"),
    ]
    of_sessions = f" of {counted(config.agent.sessions, 'session')}" if config.agents else ""
    return ", ".join(counted(*part) for part in parts if part[0]) + of_sessions


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
    if not config.evaluation_sets:
        return "none"
    every = f"every {config.evaluation.every} steps" if config.evaluation.every else "at the start and at the end"
    sets = [
        f"{f'{one.name}, ' if one.number else ''}{one.source.path}, {one.prompts} prompts at most"
        for one in config.evaluation_sets
    ]
    return f"{'; '.join(sets)}, {every}"


def describe_devices(config: Config, placed: dict[str, list[str]]) -> str:
    ranks, each = wanted(config)
    if not placed:
        return "none here: learner and workers compute on the CPU" if ranks or each else "no accelerator"
    for_workers = config.worker.count * each
    parts = [f"{count} {name}" for count, name in ((for_workers, "for workers"), (ranks, "for the learner")) if count]
    shared = " that share them" if config.devices.share and len(parts) > 1 else ""
    return f"{counted(needed_devices(config), 'accelerator')}: {', '.join(parts)}{shared}"


def describe_ports(config: Config) -> str:
    """Where this machine's parts listen: * and 0 are any port that is free, as is a lane's."""
    servers = f"{config.engine.port} and up" if config.engine.port else ""
    opened = {
        "broker": config.broker.bind.removeprefix("tcp://"),
        "metrics": config.operations.http,
        "agents": config.agent.listen if config.agents else "",
        "servers": servers,
        "learner ranks": str(config.launch.port + 1) if config.launch.learner_nodes > 1 else "",
    }
    return ", ".join(f"{name} {place}" for name, place in opened.items() if place)


def planned(config: Config, devices: Sequence[str]) -> dict[str, list[str]]:
    """By part, of the devices that are here, or of as many as are wanted where these do not suffice."""
    try:
        return place(config, devices)
    except ConfigError:
        return lay_out(config, list(map(str, range(needed_devices(config)))))


def training(config: Config, shape: Shape | None) -> str:
    if shape is None:
        return "memory unknown without the model"
    try:
        states = states_bytes(config, shape)
        trained = adapter_parameters(config) if config.lora.is_set else 0
    except ConfigError:
        return "memory unknown with an adapter that does not fit the model"
    said = (
        f"{count_of(trained)} trained parameters, {trained / shape.parameters:.1%} of the model's; " if trained else ""
    )
    if needs_values(config.algorithm, imported=False):
        said += "a critic of the model's size; "
    on_top = f"activations of {config.learner.microbatch_tokens} tokens on top"
    return f"{said}{size(states)} of weights, gradients and moments a rank, {on_top}"


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


def describe_lanes(config: Config, shape: Shape | None, placed: dict[str, list[str]]) -> str:
    engine = ENGINES.find(config.worker.engine)
    lanes = [lane for index in range(config.worker.count) for lane in engine.lanes(config, f"worker-{index}")]
    ends = "worker" if len(lanes) == config.worker.count else "server"
    backend: str = config.weights.backend
    if backend == "auto":
        backend = "nccl" if placed and all(wanted(config)) and not config.devices.share else "gloo"
        if config.engine.url and engine.broadcasts_to_servers(config):
            backend = "what its device takes"
    sent = f", {size(shape.parameters * WEIGHT_BYTES)} each" if shape else ""
    return f"{len(lanes)}: learner rank 0 to each {ends} over {backend}{sent} at every step"


def describe_groups(config: Config) -> list[str]:
    """Who is in which weight group under which rank; a line for each lane."""
    engine = ENGINES.find(config.worker.engine)
    lanes = [lane for index in range(config.worker.count) for lane in engine.lanes(config, f"worker-{index}")]
    return [f"{lane}: {engine.describe_lane(config)}" for lane in lanes]
