"""What `april run` makes sure of before it starts a process, and what a dry run says: one list of checks for both."""

import importlib.util
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from april.agents import PROGRAMS
from april.agents.listening import AttachKey, tls_of
from april.broker.fingerprints import tensors_of
from april.broker.prompts import PromptBook
from april.broker.schedules import SCHEDULES
from april.broker.submitted import open_prompts
from april.broker.telemetry.alarm import check_alarms
from april.broker.telemetry.sink import check_sinks
from april.config import Config, ConfigError, SourceSection
from april.config.checks import check_algorithm, check_critic, check_engine, check_model, check_schedule, needs_values
from april.config.sharing import check_turns
from april.data.dataset import verifier_of
from april.data.formats import ARROW, PARQUET, data_files, kind_of
from april.data.tokenizer import import_without_torch
from april.environments import ENVIRONMENTS
from april.environments.turns import turn_end_ids
from april.files.objects import StoreError
from april.filters.filters import GroupFilters
from april.formats.stored import refused, store_of
from april.launch import TARGETS
from april.launch.adapter import adapter_parameters
from april.launch.devices import check_nodes, numa_nodes, place
from april.launch.memory import division_of
from april.learner.backends import BACKENDS
from april.learner.losses import ADVANTAGES, CORRECTIONS, LOSSES, STEP_SCALES
from april.security.allow_list import AllowList
from april.security.keys import ALLOW_LIST, ROLES, find_key_file, load_keys, refusal
from april.weights import TRANSPORTS
from april.words import size
from april.workers.engines import ENGINES
from april.workers.rewards.sandbox import check_isolation
from april.workers.rewards.verifiers import check_verifier

LABEL_WIDTH = 11
STATE_BYTES = 12
"""of a trained parameter in a checkpoint: weight and two moments of AdamW, in float32"""


@dataclass
class Findings:
    facts: dict[str, str] = field(default_factory=dict)
    """what was found, by a word for it"""
    remarks: list[str] = field(default_factory=list)
    """what a run starts with nevertheless, a sentence each"""
    objections: list[str] = field(default_factory=list)
    """what keeps it from starting, a sentence each, a traceback perhaps behind it"""

    def passes(self, check: Callable[..., Any], *arguments) -> Any:
        """What the check returns; None where it objects."""
        try:
            return check(*arguments)
        except ConfigError as error:
            if str(error) not in self.objections:
                self.objections.append(str(error))

    def lines(self) -> list[str]:
        """The facts, a line each, further lines of one indented."""
        indent = "\n" + " " * LABEL_WIDTH
        return [f"{label:{LABEL_WIDTH}}{text}".replace("\n", indent) for label, text in self.facts.items() if text]

    def refuse(self) -> None:
        """Raises ConfigError for the first objection."""
        if self.objections:
            raise ConfigError(self.objections[0])


def look(config: Config, devices: Sequence[str], parameters: int, found: Findings) -> PromptBook | None:
    """Find all that can be found without trying rows; the prompts, where they can be read. `devices`: accelerators, by
    name; `parameters`: of the model, 0 if that is not known."""
    data, passes = config.data, found.passes
    passes(check_model, config)
    if (config.model.path / "config.json").is_file():
        passes(check_weights, config.model.path)
    if not data.train_sources and data.source == "files":
        found.objections.append("no training prompts: set data.path")
    for source in config.sources:
        passes(check_source, source)
    readable = not found.objections
    passes(check_keys, config.security.keys, unused_roles(config))
    passes(check_engine, config)
    installed = passes(lambda: ENGINES.find(config.worker.engine).installed(config))
    passes(check_schedule, config.schedule)
    passes(check_learner_parts, config)
    backend = passes(installed_backend, config)
    kind = passes(SCHEDULES.find, config.schedule.kind)
    passes(check_turns, config, kind, passes(BACKENDS.find, config.learner.backend))
    passes(GroupFilters, config.schedule)
    passes(check_sinks, config.operations.sinks)
    passes(check_alarms, config.operations.alarms)
    for name, key in verifiers_of(config).items():
        passes(check_verifier, name, key, config.reward.url)
    if config.environment.name:
        passes(ENVIRONMENTS.find, config.environment.name)
    if config.reward.code_isolation == "strict":
        passes(check_isolation, config.reward.code_isolation)
    passes(check_agent, config)
    passes(TARGETS.find, config.run.target)
    passes(TRANSPORTS.find, config.weights.transport)
    passes(check_devices, config, devices)
    division = passes(division_of, config, devices) if readable else None
    found.facts["memory"] = division.said if division else ""
    trained = passes(adapter_parameters, config) if readable and config.lora.is_set else parameters
    critic = parameters if needs_values(config.algorithm, imported=False) else 0
    found.facts["disk"] = passes(check_room, config, (trained or 0) + (critic or 0)) or ""
    found.facts["store"] = passes(check_store, config) or ""
    found.facts["installed"] = ", ".join(filter(None, (installed, backend)))
    import_without_torch()  # what somebody's own parts import is there by now
    book = passes(open_prompts, config) if readable else None
    if book:
        passes(turn_end_ids, config.environment.turn_ends, book.tokenizer)
        for name in sorted(book.rows.rewards.union(*(one.rows.rewards for one in book.held_out.values()))):
            passes(check_verifier, name, "reward of a row", config.reward.url)
    return book


def verifiers_of(config: Config) -> Mapping[str, str]:
    """Those that the configuration names, and by which key."""
    named = {verifier_of(source): "data.reward" for source in config.sources}
    return {name: key for name, key in (named | {config.reward.name: "reward.name"}).items() if name}


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


def check_learner_parts(config: Config) -> None:
    """That the learner will find a loss, corrections and advantages of somebody's own, where torch is there to look at
    them. Shipped ones were checked with the configuration, and cost an import."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("torch is not installed; `pip install 'april-rl[learner,worker]'`")
    algorithm = config.algorithm
    named = {(LOSSES, algorithm.loss), (ADVANTAGES, algorithm.advantage)}
    named |= {(CORRECTIONS, name) for name in algorithm.corrections}
    named |= {(STEP_SCALES, algorithm.step_scale)} if algorithm.step_scale else set()
    if any(name not in registry.shipped for registry, name in named):
        check_algorithm(algorithm)
        for registry, name in named:
            registry.find(name)
        check_critic(config, imported=True)


def installed_backend(config: Config) -> str:
    """What spreads the model over the learner's ranks, if there is something to say of it. Raises ConfigError."""
    backend = BACKENDS.find(config.learner.backend)
    backend.check(config)
    return backend.installed()


def check_weights(folder: Path) -> None:
    """That weights are there, and whole. Raises ConfigError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"key 'model.path' = {str(folder)!r} has no weights (*.safetensors); give a whole Hugging Face folder"
        )
    for file in files:
        size, wanted = file.stat().st_size, max((one.start + one.size for one in tensors_of(file)), default=0)
        if size < wanted:
            raise ConfigError(f"key 'model.path': {file} is cut off at {size} of {wanted} bytes; fetch it again")
    index = folder / "model.safetensors.index.json"
    shards = set(orjson.loads(index.read_bytes()).get("weight_map", {}).values()) if index.is_file() else set()
    if missing := sorted(shards - {file.name for file in files}):
        raise ConfigError(
            f"key 'model.path' = {str(folder)!r} lacks {len(missing)} of {len(shards)} files of weights, the first "
            f"{missing[0]}; fetch the rest"
        )


def check_agent(config: Config) -> None:
    """That its program can be found, and what its API shows to others. Raises ConfigError."""
    agent = config.agent
    tls_of(agent)
    AttachKey(agent.attach_keyfile)
    if agent.program and not inspect.isclass(PROGRAMS.find(agent.program)) and agent.options:
        raise ConfigError(
            f"key 'agent.options' = {agent.options!r} is for a program that is a class, and agent.program = "
            f"{agent.program!r} is a function; leave it out, or name a class"
        )
    if agent.command and not shutil.which(agent.command[0]):
        raise ConfigError(
            f"key 'agent.command' = {agent.command!r} cannot be started: there is no {agent.command[0]!r} on the PATH; "
            "install it, or give its path"
        )


def check_devices(config: Config, devices: Sequence[str]) -> None:
    """`auto` is content with none."""
    check_nodes(config, place(config, devices), numa_nodes(devices))


def check_room(config: Config, trained: int) -> str:
    """That the run's folder can be written, and holds its checkpoints; how much is free. Raises ConfigError."""
    folder = config.run_dir
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".april-"):
            pass
    except OSError as error:
        raise ConfigError(
            f"key 'run.dir' = {str(config.run.dir)!r} cannot be written: {folder}: {os.strerror(error.errno or 0)}; "
            "give a writable folder"
        ) from None
    free, kept = shutil.disk_usage(folder).free, config.learner.keep_checkpoints
    needed = (kept + 1) * STATE_BYTES * trained
    if free < needed:
        raise ConfigError(
            f"key 'run.dir' = {str(config.run.dir)!r} has {size(free)} free, and learner.keep_checkpoints = {kept} and "
            f"the one that is written take {size(needed)}; make room, give another folder, or keep fewer"
        )
    return f"{size(free)} free for the run, of which checkpoints take {size(needed)}"


def check_store(config: Config) -> str:
    """That its checkpoints can be written to their store from here, and read; where that is. Raises ConfigError."""
    if not config.learner.checkpoint_store:
        return ""
    objects = store_of(config).tried_once()
    try:
        objects.probe()
    except StoreError as error:
        raise refused(error) from None
    return f"checkpoints can be written to {objects.url}"


def unused_roles(config: Config) -> set[str]:
    """Of peers that this run has none of."""
    return {role for role, count in (("scorer", config.scorers), ("agents", config.agents)) if not count}


def check_keys(folder: Path | None, unused: Collection[str]) -> None:
    """That every part will find its key, and be let in with it, but for the `unused` roles. Raises ConfigError."""
    if folder is None:
        return
    allow_list = AllowList(folder / ALLOW_LIST)
    broker = load_keys(folder, "broker")
    for role in set(ROLES) - set(unused):
        keys = load_keys(folder, role)
        if keys.broker != broker.public:
            raise refusal(find_key_file(folder, role), "names another broker", "make it anew with `april keygen`")
        if allow_list.find(keys.public).role != role:
            raise refusal(allow_list.path, f"does not list the key of {role}.key as a {role}'s", "add that line")
