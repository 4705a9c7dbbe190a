"""The checks that `april run` makes before it starts a process; `--dry-run` prints their findings."""

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import orjson

from april.agents import PROGRAMS
from april.agents.listening import AttachKey, server_tls
from april.broker.alarms.alarm import check_alarms
from april.broker.conformance.runs import try_schedule
from april.broker.filters import GroupFilters
from april.broker.header import tensors_of
from april.broker.prompts import PromptBook, open_prompts
from april.broker.samplers.draws import check_sampler
from april.broker.schedules import SCHEDULES
from april.broker.telemetry.sinks import check_sinks
from april.config import Config, ConfigError, ScheduleSection, SourceSection
from april.config.advantages import needs_critic
from april.config.algorithms import algorithms, divided, told_of_source
from april.config.checks import (
    check_algorithms,
    check_engine,
    check_model,
    check_schedule,
)
from april.config.loading import validate
from april.config.sharing import check_time_sharing
from april.config.stored import store_of, store_refused
from april.data.dataset import verifier_of
from april.data.records import ARROW, PARQUET, data_files, kind_of
from april.data.tokenizer import import_without_torch
from april.launch import TARGETS
from april.launch.devices import check_nodes, numa_nodes, place_parts
from april.launch.findings import Findings
from april.launch.memory import adapter_parameters, has_tensors, plan_memory
from april.learner.backends import BACKENDS
from april.learner.losses import (
    ADVANTAGES,
    CORRECTIONS,
    DISTILLATIONS,
    DIVERGENCES,
    LENGTH_PENALTIES,
    LOSSES,
    STEP_SCALES,
)
from april.learner.optimizers import OPTIMIZERS, check_installed
from april.util.errors import NotTried, refuse
from april.util.files import has_weights, weight_files
from april.util.logs import last_error, user_traceback
from april.util.objects import StoreError
from april.util.registry import add_import_folders, python_command
from april.util.text import format_bytes
from april.weights import TRANSPORTS
from april.wire.message import Version
from april.wire.security.allow_list import AllowList
from april.wire.security.keys import ALLOW_LIST, ROLES, find_key_file, load_keys
from april.workers.engines import ENGINES
from april.workers.environments import ENVIRONMENTS
from april.workers.environments.turns import turn_end_ids
from april.workers.rewards.sandbox import check_isolation
from april.workers.rewards.verifiers import check_verifier
from april.workers.teachers.check import check_teacher

PEFT_PREFIX = "base_model.model."
"""Beginning of the names of tensors that peft has saved with its wrapper."""
PLAIN_TYPES, PLAIN_POSITIONS = ("llama", "qwen2", "qwen3"), ("default", "linear", "llama3", "yarn")
"""Values of `model_type` and of `rope_type` in config.json, any two of which engines and learner are tested with. Of
others a run trains and samples a small model before it starts."""
TRIAL = "from april.launch.check import tell_objections; tell_objections()"
TRIAL_S = 600.0
DEVICE = "cuda"
NEEDS_DEVICE = re.compile(r"cuda|gpu|triton|nvidia|rocm|active driver|'CPU' backend", re.IGNORECASE)
"""Regular expression for a traceback whose cause may be that there is no accelerator."""
NEEDS_RUN = re.compile(r'"(?:<frozen os>|\S+/os\.py)", line \d+, in __getitem__|process group has not been init', re.I)
"""Regular expression for a traceback whose cause may be that only a rank has its environment and its collectives."""
DEVICE_TAKEN = re.compile(r"out of memory|busy or unavailable", re.IGNORECASE)
"""Regular expression for the error of an accelerator that other processes occupy."""
STATE_BYTES = 12
"""Checkpoint bytes per trained parameter: float32 weight and two AdamW moments."""


def check_run(
    config: Config, devices: Sequence[str], parameters: int, found: Findings, has_learner: bool = True
) -> PromptBook | None:
    """Make all checks that call no user-defined function on a row; returns the prompts, None if they cannot be read.
    `devices`: names of the accelerators; `parameters`: number of model parameters, 0 if unknown; `has_learner`: whether
    April's learner trains, not a trainer of the user's."""
    data, run_check = config.data, found.run_check
    if run_check(check_model, config):
        folder = config.model.path
        weighed = (config.model.commit and not has_weights(folder)) or run_check(check_weights, folder)
        if weighed and not is_plain(config):
            trial = check_models if has_learner else check_engine_model
            try_apart(trial, config, found, f"whether {folder} can be {'trained and ' * has_learner}sampled")
    if not data.train_sources and data.source == "files":
        found.errors.append("no training prompts: set data.path")
    for source in (*config.sources, *data.sft_sources.values()):
        run_check(check_source, source)
    readable = not found.errors
    run_check(check_keys, None if config.made_keys else config.keys, unused_roles(config))
    run_check(check_engine, config)
    installed = run_check(lambda: ENGINES.find(config.worker.engine).installed(config))
    if not config.is_shipped("worker.engine") and installed is not None:
        try_part(check_own_engine, config, found, bool(devices) and config.worker.device != "cpu")
    run_check(check_schedule, config.schedule)
    if not config.is_shipped("schedule.kind"):
        run_check(check_own_schedule, config.schedule)
    if run_check(check_learner_parts, config) and has_learner:
        for number, each in divided(config).items():
            before = len(found.errors)
            try_part(try_objective, each, found, bool(devices) and config.learner.device != "cpu")
            found.errors[before:] = [told_of_source(number, sentence) for sentence in found.errors[before:]]
    backend = run_check(installed_backend, config) if has_learner else None
    kind = run_check(SCHEDULES.find, config.schedule.kind)
    entry = run_check(BACKENDS.find, config.learner.backend) if has_learner else None
    run_check(check_time_sharing, config, kind, entry)
    run_check(GroupFilters, config.schedule)
    run_check(check_sampler, config.schedule, config.data.source == "submitted")
    run_check(check_sinks, config.operations.sinks)
    found.facts["alarms"] = run_check(check_alarms, config.operations.alarms) or ""
    for name, key in verifiers_of(config).items():
        run_check(check_verifier, name, key, config.reward.url)
    for name, teacher in config.teacher.items():
        run_check(check_teacher, config, name, teacher)
    if config.environment.name:
        run_check(ENVIRONMENTS.find, config.environment.name)
    if config.reward.code_isolation == "strict":
        run_check(check_isolation, config.reward.code_isolation)
    run_check(check_agent, config)
    run_check(TARGETS.find, config.run.target)
    run_check(TRANSPORTS.find, config.weights.transport)
    run_check(check_devices, config, devices)
    memory_plan = run_check(plan_memory, config, devices) if readable else None
    found.facts["memory"] = memory_plan.description if memory_plan else ""
    adapted = has_learner and readable and config.lora.is_set
    trained = run_check(adapter_parameters, config) if adapted else parameters
    critic = parameters if needs_critic(config) else 0
    found.facts["disk"] = run_check(check_room, config, has_learner * ((trained or 0) + critic)) or ""
    found.facts["store"] = run_check(check_store, config) or ""
    found.facts["installed"] = ", ".join(filter(None, (installed, backend)))
    import_without_torch()  # after the imports of the user's own modules, which may need torch
    book = run_check(open_prompts, config) if readable else None
    if book:
        run_check(check_enough_rows, config, len(book.rows))
        run_check(turn_end_ids, config.environment.turn_ends, book.tokenizer)
        for name in sorted(book.rows.rewards.union(*(held_out.rows.rewards for held_out in book.held_out.values()))):
            run_check(check_verifier, name, "reward of a row", config.reward.url)
        if book.with_images and has_learner and not found.errors:
            try_apart(check_images, config, found, f"whether {config.model.path} sees images")
    return book


def verifiers_of(config: Config) -> Mapping[str, str]:
    """Names of the verifiers in the configuration, with the key that names each."""
    named = {verifier_of(source): "data.reward" for source in config.sources}
    named |= {part.verifier: f"reward.part.{name}.verifier" for name, part in config.reward.part.items()}
    return {name: key for name, key in (named | {config.reward.name: "reward.name"}).items() if name}


def check_source(source: SourceSection) -> None:
    """Raises ConfigError unless the source's files exist and this Python can read their format."""
    if not source.path.exists():
        raise ConfigError(
            f"data {source.path} is not there; put the dataset's files into that place, or make the quickstart's with "
            "`april make-data`"
        )
    files = data_files(source)
    if missing := [file for file in files if not file.is_file()]:
        raise ConfigError(f"data {missing[0]} is not there; copy the dataset again")
    if any(kind_of(file) in (PARQUET, ARROW) for file in files) and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"data {source.path} needs pyarrow; `pip install 'april-rl[data]'`")


def check_own_engine(config: Config, device: str) -> None:
    """Have a user's engine that computes in the worker generate for a tiny model on `device`. Raises ConfigError, and
    NotTried for one that may need an accelerator, or another model."""
    name = config.worker.engine
    if not ENGINES.find(name).in_process:
        return
    from april.workers.engines.conformance.suite import try_engine

    try:
        try_engine(name, [("engine", config.engine.model_dump(exclude_defaults=True)), ("worker.device", device)])
    except (ConfigError, NotTried):
        raise
    except Exception as error:
        check_has_device(error, f"key 'worker.engine' = {name!r}", device, config.worker.device)
        fix = f"mend it, and try it with `april check engine {name}`"
        said = str(error).partition("\n")[0] or type(error).__name__
        refuse("worker.engine", name, f"fails on a tiny model: {said}", fix, error)


def check_own_schedule(schedule: ScheduleSection) -> None:
    """Run a user's schedule on small simulated batches, without failures. Raises ConfigError for a schedule that
    stalls."""
    try:
        try_schedule(schedule)
    except AssertionError as error:
        fix = f"mend it, and try it with `april check schedule {schedule.kind}`"
        refuse("schedule.kind", schedule.kind, f"fails in a run on small batches: {error}", fix, error)


def check_learner_parts(config: Config) -> bool:
    """Whether the loss or the optimizer has parts of the user's own; if so, this call imports and checks all parts.
    Without any it imports none, since `april.config` has checked shipped ones. Raises ConfigError, also if torch is
    missing."""
    check_installed(config.learner, config.lora)
    named = {(OPTIMIZERS, config.learner.optimizer)}
    for algorithm in algorithms(config):
        named |= {(LOSSES, algorithm.loss), (ADVANTAGES, algorithm.advantage), (STEP_SCALES, algorithm.step_scale)}
        named |= {(DISTILLATIONS, algorithm.distillation), (DIVERGENCES, algorithm.divergence)}
        named |= {(CORRECTIONS, name) for name in algorithm.corrections}
        named |= {(LENGTH_PENALTIES, algorithm.length_penalty)}
    named = {(registry, name) for registry, name in named if name}
    own = any(name not in registry.shipped for registry, name in named)
    if own:
        for registry, name in named:
            registry.find(name)
        check_algorithms(config, imported=True)
    return own


def try_objective(config: Config, device: str) -> None:
    """Compute the loss of two small groups, and its gradient, on `device`, as a learner does. Raises ConfigError for an
    exception in a user's part, for a result of the wrong kind, and for a loss that is not finite; NotTried for a part
    that may need an accelerator."""
    import torch

    from april.learner.batch import TrainingBatch, TrainSample
    from april.learner.diagnostics import StepTotals
    from april.learner.losses.ranks import SingleRank
    from april.learner.objective import Objective

    def sample(length: int, reward: float) -> TrainSample:
        logprobs = np.linspace(-2.0, -0.1, length, dtype=np.float32)
        versions = (0, 1, Version(0, 1)), (1, length, Version(0, 2))
        scores, parts = dict.fromkeys(config.teacher, logprobs), dict.fromkeys(config.reward.part, reward)
        tokens = np.arange(length + 2, dtype=np.int32)
        return TrainSample(tokens, 2, logprobs, reward, versions, details=parts, token_scores=scores)

    lengths, place = range(3, 3 + max(2, config.schedule.n_samples_per_prompt)), torch.device(device)
    groups = [[sample(length, float((length + group) % 2)) for length in lengths] for group in range(2)]
    try:
        objective = Objective(config, SingleRank())
        prepared = objective.prepare(TrainingBatch(2, groups))
        count = len(prepared.samples)
        if objective.needs_norms:
            ones = torch.ones(count, dtype=torch.float64)
            objective.set_norm_advantages(prepared, 0 * ones, ones)
        tokens = objective.tokens(prepared, list(range(count)), place)
        if objective.needs_values:
            objective.estimator(tokens.advantages, tokens.behaviour_logprobs, tokens.spans, config.critic)
        logprobs = (0.9 * tokens.behaviour_logprobs).requires_grad_()
        tokens = replace(tokens, scores={"reference_logprobs": tokens.behaviour_logprobs})
        rows = (logprobs[:, None] * torch.tensor([1.0, 2.0], device=place)).log_softmax(-1)
        divergences = objective.divergence(rows.detach().flip(1), rows) if objective.divergence else None
        ones = torch.ones_like(logprobs)
        loss = objective.loss(logprobs, ones, tokens, StepTotals(place), divergences=divergences)
        loss.backward()
        objective.step_scale({"off_policy_share": 0.5, "sequence_ess": 0.5})
    except ConfigError:
        raise
    except Exception as error:
        where = next(iter(getattr(error, "__notes__", [])), "section [algorithm] raised it")
        check_has_device(error, "section [algorithm]", device, config.learner.device)
        raise ConfigError(
            f"{where.removesuffix(' it')} {type(error).__name__}: {error}; mend it\n{user_traceback(error)}"
        ) from error
    if not (torch.isfinite(loss) and logprobs.grad is not None and torch.isfinite(logprobs.grad).all()):
        refuse("algorithm.loss", config.algorithm.loss, f"is {loss.item():g} on a small batch", "mend it")


def installed_backend(config: Config) -> str:
    """Description of the installed sharding backend, perhaps empty. Raises ConfigError if it cannot be used."""
    backend = BACKENDS.find(config.learner.backend)
    backend.check(config)
    return backend.installed_version()


def check_weights(folder: Path) -> bool:
    """True, if the model's folder has all its weight files, complete. Raises ConfigError otherwise."""
    files = weight_files(folder)
    if not files:
        refuse("model.path", folder, "has no weights (*.safetensors)", "give a whole Hugging Face folder")
    if missing := [file.name for file in files if not file.is_file()]:
        why = f"lacks {len(missing)} of {len(files)} files of weights, the first {missing[0]}"
        refuse("model.path", folder, why, "fetch the rest")
    for file in files:
        size, wanted = file.stat().st_size, max((tensor.start + tensor.size for tensor in tensors_of(file)), default=0)
        if size < wanted:
            why = f"has a {file.name} that is cut off at {size} of {wanted} bytes"
            refuse("model.path", folder, why, "fetch it again")
        if peft := next((tensor.name for tensor in tensors_of(file) if tensor.name.startswith(PEFT_PREFIX)), ""):
            fix = "merge the adapter with peft's merge_and_unload, and save the model again"
            refuse("model.path", folder, f"has weights by peft's names, such as {peft}", fix)
    return True


def is_plain(config: Config) -> bool:
    """Whether a model's config.json has only what engines and learner are tested with, and the weights have the names
    and shapes that it implies."""
    shape = config.model_shape or {}
    ropes = [shape.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    return (
        shape.get("model_type") in PLAIN_TYPES
        and shape.get("hidden_act", "silu") == "silu"
        and not shape.get("use_sliding_window")
        and not shape.get("quantization_config")
        and all(isinstance(rope, dict) for rope in ropes)
        and all((rope.get("rope_type") or rope.get("type") or "default") in PLAIN_POSITIONS for rope in ropes)
        and has_tensors(config.model.path, shape)
    )


def try_part(trial: Callable[[Config, str], None], config: Config, found: Findings, on_device: bool) -> None:
    """Try a user's part by `trial` (a function of configuration and device). `on_device`: on the accelerator, in a
    process that frees its memory at the end; otherwise in this process on the CPU. `found` gets the results."""
    if on_device:
        try_apart(trial, config, found, "a part of one's own")
    else:
        found.run_check(trial, config, "cpu")


def check_has_device(error: Exception, part: str, device: str, configured: str) -> None:
    """Raises NotTried if the `error` of a trial need not be a fault of the user's part: the accelerator is missing or
    occupied, or the part needs the environment or collectives of a run's ranks. `part`: what was tried, as the subject
    of the error; `device`: where it was tried, "cpu" or the accelerator; `configured`: the device configured."""
    on_cpu, told = device == "cpu", "".join(traceback.format_exception(error))
    outside = NEEDS_RUN.search(told)
    where = "outside of a run" if outside else f"{'without an' if on_cpu else 'on the'} accelerator"
    if outside or (configured != "cpu" and (NEEDS_DEVICE if on_cpu else DEVICE_TAKEN).search(told)):
        raise NotTried(f"{part} could not be tried {where}: {str(error) or type(error).__name__}") from error


def try_apart(trial: Callable[..., None], config: Config, found: Findings, subject: str) -> None:
    """Make a trial in a process of its own, since it needs torch or an accelerator. What the trial objects to is added
    to `found` as an error; that it could not be made, as a warning about `subject`, what is tried."""
    words = python_command("-c", TRIAL, trial.__name__)
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(words, input=config.to_toml().encode(), capture_output=True, timeout=TRIAL_S, env=env)
        told = msgspec.json.decode(ended.stdout.splitlines()[-1], type=Findings)
    except subprocess.TimeoutExpired:
        said = f"it took longer than {TRIAL_S:g} s"
    except (IndexError, msgspec.DecodeError):
        said = last_error(ended.stderr.decode(errors="replace")) or f"the trial ended with status {ended.returncode}"
    else:
        found.errors += [sentence for sentence in told.errors if sentence not in found.errors]
        found.warnings += told.warnings
        return
    found.warnings.append(f"{subject} could not be tried: {said}")


def tell_objections() -> None:
    """Program of a trial's process: make the trial, a function of this module, that the first argument names, with the
    configuration from stdin, on the accelerator, and print the `Findings` as JSON."""
    add_import_folders()
    config, found, trial = validate(tomllib.loads(sys.stdin.read())), Findings(), globals()[sys.argv[1]]
    if trial in (check_models, check_engine_model):
        trial(config, found)
    else:
        found.run_check(trial, config, DEVICE)
    print(f"\n{orjson.dumps(found).decode()}")


def check_models(config: Config, found: Findings) -> None:
    """Have the learner's back end and the engine check the model; only called if it is not plain (`is_plain`)."""
    found.run_check(BACKENDS.find(config.learner.backend).check_model, config)
    check_engine_model(config, found)


def check_images(config: Config, device: str) -> None:
    """Have the learner's back end check that the images of prompts reach the model. Raises ConfigError."""
    BACKENDS.find(config.learner.backend).check_images(config)


def check_engine_model(config: Config, found: Findings) -> None:
    found.run_check(ENGINES.find(config.worker.engine).check_model, config)


def check_agent(config: Config) -> None:
    """Raises ConfigError unless the agent's program, TLS files and attach key can be used."""
    agent = config.agent
    server_tls(agent)
    AttachKey(agent.attach_keyfile)
    if agent.program and not inspect.isclass(PROGRAMS.find(agent.program)) and agent.options:
        refuse(
            "agent.options",
            agent.options,
            f"is for a program that is a class, and agent.program = {agent.program!r} is a function",
            "leave it out, or name a class",
        )
    if agent.command and not shutil.which(agent.command[0]):
        refuse(
            "agent.command",
            agent.command,
            f"cannot be started: there is no {agent.command[0]!r} on the PATH",
            "install it, or give its path",
        )


def check_devices(config: Config, devices: Sequence[str]) -> None:
    """Raises ConfigError unless the accelerators suffice for the configured devices; with the device `auto`, none need
    to be there."""
    check_nodes(config, place_parts(config, devices), numa_nodes(devices))


def check_room(config: Config, trained: int) -> str:
    """Sentence about the free disk space. Raises ConfigError if run.dir is not writable or too small for the
    checkpoints. `trained`: number of trained parameters, 0 if unknown."""
    folder = config.run_dir
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".april-"):
            pass
    except OSError as error:
        refuse(
            "run.dir",
            config.run.dir,
            f"cannot be written: {folder}: {os.strerror(error.errno or 0)}",
            "give a writable folder",
        )
    free, kept = shutil.disk_usage(folder).free, config.learner.keep_checkpoints
    needed = (kept + 1) * STATE_BYTES * trained
    if free < needed:
        refuse(
            "run.dir",
            config.run.dir,
            f"has {format_bytes(free)} free, and learner.keep_checkpoints = {kept} and the one that is written "
            f"take {format_bytes(needed)}",
            "make room, give another folder, or keep fewer",
        )
    return f"{format_bytes(free)} free for the run" + f", of which checkpoints take {format_bytes(needed)}" * (
        needed > 0
    )


def check_store(config: Config) -> str:
    """Sentence about the checkpoint store, empty if there is none. Raises ConfigError unless it can be written and
    read."""
    if not config.learner.checkpoint_store:
        return ""
    objects = store_of(config).tried_once()
    try:
        objects.probe()
    except StoreError as error:
        raise store_refused(error) from None
    return f"checkpoints can be written to {objects.url}"


def unused_roles(config: Config) -> set[str]:
    """Roles that have no process in this run."""
    return {role for role, count in (("scorer", config.scorers), ("agents", config.agents)) if not count}


def check_keys(folder: Path | None, unused: Collection[str]) -> None:
    """Raises ConfigError unless every role but the `unused` ones has a key in `folder` that the broker's allow list
    accepts. Does nothing for None, a run without keys."""
    if folder is None:
        return
    allow_list = AllowList(folder / ALLOW_LIST)
    broker = load_keys(folder, "broker")
    for role in set(ROLES) - set(unused):
        keys = load_keys(folder, role)
        if keys.broker != broker.public:
            refuse(
                "security.keys", find_key_file(folder, role), "names another broker", "make it anew with `april keygen`"
            )
        if allow_list.find(keys.public).role != role:
            refuse(
                "security.keys", allow_list.path, f"does not list the key of {role}.key as a {role}'s", "add that line"
            )


def check_enough_rows(config: Config, rows: int) -> None:
    """Refuse a run whose dataset never fills a batch. `rows`: usable rows of the dataset."""
    section, epochs = config.schedule, config.data.epochs
    if epochs is not None and section.last_batch == "drop" and rows * epochs < section.rollout_batch_size:
        refuse(
            "schedule.rollout_batch_size",
            section.rollout_batch_size,
            f"is never reached: data.epochs = {epochs} of {rows} rows are {rows * epochs} groups",
            "lower it, raise data.epochs, or set schedule.last_batch = 'train'",
        )
