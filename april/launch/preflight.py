"""What `april run` makes sure of before it starts a process: inputs that can be read, a folder of its own."""

import contextlib
import fcntl
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from april.broker import recovery
from april.broker.header import check_header, make_header
from april.broker.journal.files import JournalError
from april.broker.journal.journal import Journal
from april.broker.journal.place import journal_of
from april.broker.journal.snapshot import SnapshotStore
from april.broker.ledger.ledger import Ledger
from april.broker.plan import ledger_rules
from april.broker.recovery import SyncNote, check_whole, rebuild
from april.broker.submitted import open_prompts
from april.broker.telemetry.recorder import read_summary
from april.config import Config, ConfigError
from april.config.paths import anchor
from april.files.objects import StoreError
from april.files.replace import replace_file
from april.formats.stored import refused, stored_checkpoints
from april.formats.versions import FILE, RUN_FOLDER
from april.launch.check import Findings, look
from april.launch.rehearsal import Rehearsal
from april.launch.rows import look_at_rows
from april.launch.shape import read_shape
from april.simulate.recording import recorded_header

CHANGED = "resumed with a changed key: "


def examine(config: Config, devices: Sequence[str], patience_s: float) -> Findings:
    """All that can be found out before anything is started: what it needs, its rows, and functions of one's own once.

    `devices`: accelerators, by name; `patience_s`: for grading more than a row of each verifier.
    """
    found, shape = Findings(), read_shape(config.model.path)
    with Rehearsal(config, found) as rehearsal:
        book = look(config, devices, shape.parameters if shape else 0, found)
        if book and (seen := look_at_rows(config, book, found)):
            rehearsal.hold(seen, book.tokenizer, patience_s)
    return found


def make_run_folder(config: Config, asks: bool = True) -> Config:
    """A run never writes into another's folder: a taken name gets a number. The configuration with its name.
    `asks`: the store of checkpoints, too, whether the name is taken."""
    name, number = config.run.name, 1
    while True:
        named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        try:
            if asks and is_stored(named):
                named.run.dir.mkdir(parents=True, exist_ok=True)
                raise FileExistsError
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


def is_stored(config: Config) -> bool:
    """Whether a run of that name has checkpoints in the store. Raises ConfigError."""
    stored = stored_checkpoints(config, once=True)
    try:
        return stored is not None and bool(stored.objects.names())
    except StoreError as error:
        raise refused(error) from None


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


def check_resume(config: Config, accept_loss: bool = False) -> list[str]:
    """That the named run can go on now; what differs from its configuration so far, one line a key, and what was given
    up. `accept_loss`: go on with what is left of a journal that has lost its end."""
    run_dir = config.run_dir
    try:
        if not journal_of(run_dir).is_dir():
            raise ConfigError(
                f"key 'run.name' = {config.run.name!r} names no run in {config.run.dir} to resume; give one that does"
            )
        RUN_FOLDER.check(run_dir)
        given_up = check_journal(config, accept_loss)
    except JournalError as error:
        raise ConfigError(f"run {config.run.name} cannot be resumed: {error}") from None
    except StoreError as error:
        raise refused(error) from None
    summary = read_summary(run_dir / "summary.json")
    exported = config.exported_policy.is_dir()
    if exported and summary.get("state") == "finished" and summary.get("steps", 0) >= config.schedule.max_steps:
        raise ConfigError(
            f"run {config.run.name} is finished at {summary['steps']} steps; "
            f"raise key 'schedule.max_steps' = {config.schedule.max_steps} to train it further"
        )
    before = read_toml(run_dir / "config.toml")
    anchor(before, Path.cwd())
    changed = differences(before, tomllib.loads(config.to_toml()))
    return [f"{CHANGED}{line}" for line in changed] + [f"given up: {line}" for line in given_up]


def check_journal(config: Config, accept_loss: bool) -> list[str]:
    """That no other broker has it, that it is of this configuration, and that it is whole; or what was given up of it.
    Raises JournalError."""
    folder, stored = journal_of(config.run_dir), stored_checkpoints(config, once=True)
    with contextlib.closing(Journal(folder)) as journal:
        if recorded := recorded_header(folder):
            check_header(recorded, make_header(config, open_prompts(config)))
        if not accept_loss:
            ledger = Ledger(ledger_rules(config))
            rebuild(ledger, journal, SnapshotStore(folder), SyncNote(folder).position)
            check_whole(config.run_dir, journal, ledger, stored.steps() if stored else ())
    return recovery.accept_loss(config, stored) if accept_loss else []


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


def note_resume(run_dir: Path, said: list[str]) -> None:
    """Write down that the run goes on from here, and with which keys changed, for the report. `said`: by
    `check_resume`."""
    changed = [line.removeprefix(CHANGED) for line in said if line.startswith(CHANGED)]
    line = {"time": time.time(), "step": read_summary(run_dir / "summary.json").get("steps", 0), "changed": changed}
    with (run_dir / "resumes.jsonl").open("ab") as file:
        file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def too_many_failed(config: Config) -> str:
    """Why a run that has finished is no success, in one sentence; empty: it is one."""
    shares = read_summary(config.run_dir / "summary.json").get("failed_share") or {}
    for name, share in shares.items():
        if share > (most := config.reward.max_failed_share):
            return (
                f"{share:.1%} of the {name} prompts have failed for good, more than key 'reward.max_failed_share' = "
                f"{most:g}; `april dead-letters {config.run_dir}` says why"
            )
    return ""


def mark_ended(run_dir: Path, state: str, why: str = "") -> None:
    """Let summary.json not say "running" of a run whose broker could not say how it ended, and say why it failed."""
    path = run_dir / "summary.json"
    summary = read_summary(path)
    ended = summary | ({"failure": why} if why else {})
    if summary.get("state") == "running":
        ended["state"] = state
    if ended != summary:
        replace_file(path, orjson.dumps(ended, option=orjson.OPT_INDENT_2))
