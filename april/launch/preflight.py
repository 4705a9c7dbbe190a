"""What `april run` makes sure of before it starts a process: inputs that can be read, a folder of its own."""

import contextlib
import fcntl
import importlib.util
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path

import orjson

from april.agents import PROGRAMS
from april.broker.header import check_header, make_header
from april.broker.journal.journal import Journal, JournalError
from april.broker.prompts import PromptBook
from april.broker.telemetry.alarm import check_alarms
from april.broker.telemetry.recorder import read_summary, replace_file
from april.broker.telemetry.sink import check_sinks
from april.config import Config, ConfigError
from april.config.checks import check_algorithm, check_engine, check_schedule
from april.config.sections import AlgorithmSection
from april.environments import ENVIRONMENTS
from april.environments.turns import turn_end_ids
from april.filters.filters import GroupFilters
from april.formats.versions import FILE, RUN_FOLDER
from april.launch import TARGETS
from april.learner.losses import ADVANTAGES, LOSSES
from april.security.allow_list import AllowList
from april.security.keys import ALLOW_LIST, ROLES, find_key_file, load_keys, refusal
from april.simulate.recording import recorded_header
from april.weights import TRANSPORTS
from april.workers.rewards.verifiers import check_verifier


def check_inputs(config: Config) -> None:
    """Read model folder and datasets as the parts will. Raises ConfigError."""
    check_weights(config)
    check_keys(config.security.keys, unused_roles(config))
    check_engine(config)
    check_schedule(config.schedule)
    check_learner_parts(config.algorithm)
    GroupFilters(config.schedule)
    check_sinks(config.operations.sinks)
    check_alarms(config.operations.alarms)
    check_verifier(config.reward.name, url=config.reward.url)
    if config.environment.name:
        ENVIRONMENTS.find(config.environment.name)
    if config.agent.program:
        PROGRAMS.find(config.agent.program)
    TARGETS.find(config.run.target)
    TRANSPORTS.find(config.weights.transport)
    book = PromptBook(config)
    turn_end_ids(config.environment.turn_ends, book.tokenizer)
    for name in sorted(book.rows.rewards | book.evaluation_rows.rewards):
        check_verifier(name, "reward of a row", config.reward.url)


def check_learner_parts(algorithm: AlgorithmSection) -> None:
    """That the learner will find its loss, corrections and advantages, where torch is there to look at them."""
    if importlib.util.find_spec("torch") is not None:
        check_algorithm(algorithm)
        LOSSES.find(algorithm.loss)
        ADVANTAGES.find(algorithm.advantage)


def check_weights(config: Config) -> None:
    folder = config.model.path
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"key 'model.path' = {str(folder)!r} has no weights (*.safetensors); give a whole Hugging Face folder"
        )


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


def make_run_folder(config: Config) -> Config:
    """A run never writes into another's folder: a taken name gets a number. The configuration with its name."""
    name, number = config.run.name, 1
    while True:
        named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        try:
            named.run_dir.mkdir(parents=True)
            RUN_FOLDER.claim(named.run_dir, new=True)
            return named
        except FileExistsError:
            number += 1
            name = f"{config.run.name}-{number}"
            if not config.run.dir.is_dir():
                raise ConfigError(f"key 'run.dir' = {str(config.run.dir)!r} is not a folder; give one") from None
        except OSError as error:
            raise ConfigError(
                f"key 'run.dir' = {str(config.run.dir)!r} cannot be written ({error.strerror}); give a writable folder"
            ) from None


@contextlib.contextmanager
def held(config: Config) -> Iterator[None]:
    """The run's folder is this process's alone meanwhile. Raises ConfigError where it is another's."""
    with contextlib.ExitStack() as stack:
        try:
            stamp = stack.enter_context((config.run_dir / FILE).open("rb+"))
            fcntl.flock(stamp, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, PermissionError):
            pass  # nobody can have begun it, or go on with it
        except BlockingIOError:
            raise ConfigError(
                f"key 'run.name' = {config.run.name!r} names a run that another `april run` has under way in "
                f"{config.run_dir}; stop that one first, or give another name"
            ) from None
        yield


def check_resume(config: Config) -> list[str]:
    """That the named run can go on now; what differs from its configuration so far, one line a key."""
    run_dir = config.run_dir
    if not (run_dir / "journal").is_dir():
        raise ConfigError(
            f"key 'run.name' = {config.run.name!r} names no run in {config.run.dir} to resume; give one that does"
        )
    RUN_FOLDER.check(run_dir)
    try:
        Journal(run_dir / "journal").close()
    except JournalError as error:
        raise ConfigError(f"run {config.run.name} cannot be resumed: {error}") from None
    if recorded := recorded_header(run_dir / "journal"):
        try:
            check_header(recorded, make_header(config, PromptBook(config)))
        except JournalError as error:
            raise ConfigError(str(error)) from None
    summary = read_summary(run_dir / "summary.json")
    exported = config.exported_policy.is_dir()
    if exported and summary.get("state") == "finished" and summary.get("steps", 0) >= config.schedule.max_steps:
        raise ConfigError(
            f"run {config.run.name} is finished at {summary['steps']} steps; "
            f"raise key 'schedule.max_steps' = {config.schedule.max_steps} to train it further"
        )
    return differences(read_toml(run_dir / "config.toml"), tomllib.loads(config.to_toml()))


def read_toml(path: Path) -> dict:
    """Nothing where there is no such file, or a damaged one."""
    try:
        return tomllib.loads(path.read_text())
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        return {}


def differences(before: dict, after: dict, prefix: str = "") -> list[str]:
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {old} -> {new}")
    return lines


def mark_ended(run_dir: Path, state: str, why: str = "") -> None:
    """Let summary.json not say "running" of a run whose broker could not say how it ended, and say why it failed."""
    path = run_dir / "summary.json"
    summary = read_summary(path)
    ended = summary | ({"failure": why} if why else {})
    if summary.get("state") == "running":
        ended["state"] = state
    if ended != summary:
        replace_file(path, orjson.dumps(ended, option=orjson.OPT_INDENT_2))
