"""Checks of `april run` before it starts a process: readable inputs, a run folder of its own, a resumable run."""

import contextlib
import fcntl
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from april.broker import recovery
from april.broker.header import check_header, make_header
from april.broker.journal.files import JournalError, journal_folder
from april.broker.journal.journal import Journal
from april.broker.journal.snapshot import SnapshotStore
from april.broker.ledger.ledger import Ledger
from april.broker.plan import ledger_rules, make_schedule
from april.broker.prompts import open_prompts
from april.broker.recovery import SyncNote, check_complete, rebuild
from april.broker.telemetry.recorder import read_summary
from april.config import Config, ConfigError
from april.config.loading import make_paths_absolute
from april.config.stored import store_refused, stored_checkpoints
from april.launch.check import check_run
from april.launch.findings import Findings
from april.launch.memory import read_shape
from april.launch.rehearsal import Rehearsal
from april.launch.row_checks import inspect_rows, inspect_sft_sources
from april.simulate.trace import recorded_header
from april.util.errors import refuse
from april.util.files import replace_file
from april.util.objects import StoreError
from april.util.text import masked
from april.util.versions import FILE, RUN_FOLDER

CHANGED = "resumed with a changed key: "


def examine(
    config: Config, devices: Sequence[str], patience_s: float, everything: bool = False, has_learner: bool = True
) -> Findings:
    """Make all checks of a configuration: requirements, rows, and one call of each user-defined function.

    `devices`: names of the accelerators; `patience_s`: time for grading further rows than the first of each verifier
    (seconds); `everything`: render the prompts of all rows, however long that takes; `has_learner`: whether April's
    learner trains, not a trainer of the user's.
    """
    found, shape = Findings(), read_shape(config.model.path)
    with Rehearsal(config, found) as rehearsal:
        book = check_run(config, devices, shape.parameters if shape else 0, found, has_learner)
        if book and (rows := inspect_rows(config, book, found, everything)):
            rehearsal.try_rows(rows, book.tokenizer, patience_s)
        if book:
            inspect_sft_sources(config, book.tokenizer, found, everything)
    return found


def make_run_folder(config: Config, ask_store: bool = True) -> Config:
    """Create the run folder; returns the configuration with the run's final name, which gets a number if it is taken.
    `ask_store`: also ask the checkpoint store whether the name is taken. Raises ConfigError."""
    name, number = config.run.name, 1
    while True:
        named = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        try:
            if ask_store and is_stored(named):
                named.run.dir.mkdir(parents=True, exist_ok=True)
                raise FileExistsError
            named.run_dir.mkdir(parents=True)
            RUN_FOLDER.claim(named.run_dir, new=True)
            return named
        except FileExistsError:
            number += 1
            name = f"{config.run.name}-{number}"
            if not config.run.dir.is_dir():
                refuse("run.dir", config.run.dir, "is not a folder", "give one")
        except OSError as error:
            refuse("run.dir", config.run.dir, f"cannot be written ({error.strerror})", "give a writable folder")


def is_stored(config: Config) -> bool:
    """Whether the checkpoint store has checkpoints of a run with this name. Raises ConfigError."""
    stored = stored_checkpoints(config, once=True)
    try:
        return stored is not None and bool(stored.objects.names())
    except StoreError as error:
        raise store_refused(error) from None


@contextlib.contextmanager
def lock_run_folder(config: Config) -> Iterator[None]:
    """Context manager that holds an exclusive lock on the run folder, so that no second `april run` uses it. Raises
    ConfigError if another process holds the lock; does nothing for a folder that no run has used yet."""
    with contextlib.ExitStack() as stack:
        try:
            stamp = stack.enter_context((config.run_dir / FILE).open("rb+"))
            fcntl.flock(stamp, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, PermissionError):
            pass  # no process can have started or resumed this run
        except BlockingIOError:
            refuse(
                "run.name",
                config.run.name,
                f"names a run that another `april run` has under way in {config.run_dir}",
                "stop that one first, or give another name",
            )
        yield


def check_resume(config: Config, accept_loss: bool = False) -> list[str]:
    """Check that the named run can be resumed; returns one line per changed key and per accepted loss. `accept_loss`:
    also accept a journal that is damaged or has lost its end; what is gone is then an accepted loss. Raises
    ConfigError."""
    run_dir = config.run_dir
    try:
        if not journal_folder(run_dir).is_dir():
            refuse("run.name", config.run.name, f"names no run in {config.run.dir} to resume", "give one that does")
        RUN_FOLDER.check(run_dir)
        given_up = check_journal(config, accept_loss)
    except (JournalError, OSError) as error:
        raise ConfigError(f"run {config.run.name} cannot be resumed: {error}") from None
    except StoreError as error:
        raise store_refused(error) from None
    before = read_toml(run_dir / "config.toml")
    make_paths_absolute(before, Path.cwd())
    changed = differences(before, tomllib.loads(config.to_toml()))
    return [f"{CHANGED}{line}" for line in changed] + [f"given up: {line}" for line in given_up]


def nothing_left(config: Config) -> str:
    """Sentence that a run to be resumed is finished, and how to go on; empty if it can train or evaluate more."""
    summary = read_summary(config.run_dir / "summary.json")
    if summary.get("state") != "finished" or not config.exported_policy.is_dir():
        return ""
    steps, section, name = summary.get("steps", 0), config.schedule, config.run.name
    if steps >= section.max_steps:
        more = f"raise key 'schedule.max_steps' = {section.max_steps}"
        return f"run {name} is finished at {steps} steps; {more} to train it further"
    folder = journal_folder(config.run_dir)
    with contextlib.closing(Journal(folder)) as journal:
        ledger, prompts = Ledger(ledger_rules(config)), open_prompts(config)
        rebuild(ledger, journal, SnapshotStore(folder), SyncNote(folder).position)
        prompts.bind(ledger, journal.read)
        enough = 1 if section.last_batch == "train" else section.rollout_batch_size
        trained = ledger.steps.consumed == ledger.steps.next and len(ledger.ready) < enough
        if ledger.evaluations or not trained or not make_schedule(section, prompts).has_no_work(ledger):
            return ""
    more = f"raise key 'data.epochs' = {config.data.epochs}"
    if ledger.dead_letters.discarded_groups():
        more += f", or `april dead-letters {config.run_dir} --requeue all`, and resume it again"
    return f"run {name} is finished at {steps} steps, since its prompts are exhausted; {more} to train it further"


def check_journal(config: Config, accept_loss: bool) -> list[str]:
    """Check that the journal is unlocked, fits the configuration and is complete; returns a sentence for each loss of
    the journal's content that `accept_loss` has accepted. Raises JournalError."""
    folder, stored = journal_folder(config.run_dir), stored_checkpoints(config, once=True)
    with contextlib.closing(Journal(folder)) as journal:
        if recorded := recorded_header(folder):
            check_header(recorded, make_header(config, open_prompts(config)))
        if not accept_loss:
            ledger = Ledger(ledger_rules(config))
            rebuild(ledger, journal, SnapshotStore(folder), SyncNote(folder).position)
            check_complete(config.run_dir, journal, ledger, stored.steps() if stored else ())
    return recovery.accept_loss(config, stored) if accept_loss else []


def read_toml(path: Path) -> dict:
    """Content of a TOML file; empty if it is missing or damaged."""
    try:
        return tomllib.loads(path.read_text())
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        return {}


def differences(before: dict, after: dict, prefix: str = "") -> list[str]:
    """One line per configuration key with different values: "section.key: old -> new". `prefix`: put before each
    key."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            lines.append(f"{prefix}{key}: {masked(old, key)} -> {masked(new, key)}")
    return lines


def note_resume(run_dir: Path, notes: list[str]) -> None:
    """Append this resume and its changed keys to resumes.jsonl, for the report. `notes`: the lines that `check_resume`
    has returned."""
    changed = [line.removeprefix(CHANGED) for line in notes if line.startswith(CHANGED)]
    line = {"time": time.time(), "step": read_summary(run_dir / "summary.json").get("steps", 0), "changed": changed}
    with (run_dir / "resumes.jsonl").open("ab") as file:
        file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def too_many_failed(config: Config) -> str:
    """Sentence why a finished run counts as failed: too many failed prompts; empty if it succeeded."""
    shares = read_summary(config.run_dir / "summary.json").get("failed_share") or {}
    for name, share in shares.items():
        if share > (most := config.reward.max_failed_share):
            return (
                f"{share:.1%} of the {name} prompts have failed for good, more than key 'reward.max_failed_share' = "
                f"{most:g}; `april dead-letters {config.run_dir}` says why"
            )
    return ""


def trained_nothing(config: Config) -> str:
    """Sentence that a finished run has trained no step, with the reasons counted; empty if it has trained one."""
    summary = read_summary(config.run_dir / "summary.json")
    if summary.get("steps", 1):
        return ""
    data, discarded = summary.get("data") or {}, summary.get("discarded_groups") or {}
    counted = {"rows": data.get("rows", 0), "bad rows": data.get("bad_rows", 0), "too long": data.get("too_long", 0)}
    counted |= {f"groups discarded ({reason})": count for reason, count in discarded.items()}
    reasons = ", ".join(f"{name}: {count}" for name, count in counted.items() if count or name == "rows")
    section = config.schedule
    drops = ", and schedule.last_batch = 'drop' drops a smaller one" if section.last_batch == "drop" else ""
    return (
        f"nothing was trained ({reasons}); a batch takes 'schedule.rollout_batch_size' = "
        f"{section.rollout_batch_size} groups{drops}"
    )


def mark_ended(run_dir: Path, state: str, why: str = "") -> None:
    """Correct summary.json if the broker could not: replace the state "running" by `state`, and add the reason `why` of
    a failure."""
    path = run_dir / "summary.json"
    summary = read_summary(path)
    ended = summary | ({"failure": why} if why else {})
    if summary.get("state") == "running":
        ended["state"] = state
    if ended != summary:
        replace_file(path, orjson.dumps(ended, option=orjson.OPT_INDENT_2))
