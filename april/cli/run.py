"""`april run`: a run on this machine, or a dry run of it."""

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from april.cli.command import CONFIG, INTERRUPTED, command, load_config, option
from april.util.errors import refuse
from april.util.lifetime import REFUSED

if TYPE_CHECKING:
    from april.config import Config

TOO_MANY_FAILED = 4
"""Exit status of a finished run in which a larger share of prompts than reward.max_failed_share failed for good."""
TRAINED_NOTHING = 5
"""Exit status of a finished run without a trained step."""
RUN_OPTIONS = (
    option(
        "--dry-run",
        action="store_true",
        help="Start nothing; print what would run, what it needs, and what is missing. Exit status 2 if anything is.",
    ),
    option(
        "--hardware",
        type=int,
        metavar="N",
        help="With --dry-run: plan for N accelerators [default: those of this machine].",
    ),
    option("--resume", action="store_true", help="Continue the run whose folder already has this name."),
    option(
        "--accept-loss",
        action="store_true",
        help="With --resume: continue although the end of the journal is damaged; what it recorded is lost.",
    ),
)


@command(
    CONFIG,
    *RUN_OPTIONS,
    option(
        "--without-learner",
        action="store_true",
        help="Start broker and workers only, for a trainer of your own that connects with april.connect.",
    ),
    lists_keys=True,
)
def run(
    config: list[Path],
    dry_run: bool,
    hardware: int | None,
    resume: bool,
    accept_loss: bool,
    without_learner: bool,
    overrides: list[str],
) -> int:
    """Train: start all parts of a run on this machine, and watch them."""
    if dry_run:
        return describe_run(config, hardware, resume, without_learner, overrides)
    if accept_loss and not resume:
        refuse("--accept-loss", None, "is for a run that goes on", "give --resume with it")
    from april.config.hub import Fetcher
    from april.simulate.tune import resolve
    from april.util.lifetime import die_with_parent

    if without_learner:
        die_with_parent()
    loaded = load_config(config, overrides, fetch=(fetcher := Fetcher("weights", "rows")), resumed=resume)
    for fact in fetcher.facts:
        print(f"from a hub: {fact}", flush=True)
    resolved, why_automatic = resolve(loaded, resumed=resume)
    check_trainer(resolved, without_learner)
    return start_run(resolved, why_automatic, resume, accept_loss, without_learner)


def start_run(config: "Config", why_automatic: str, resume: bool, accept_loss: bool, without_learner: bool) -> int:
    """Check, start and supervise all parts until the run ends; returns the exit status. Raises ConfigError.

    `why_automatic`: how keys that were `auto` got their values, empty if none was. The others are options of `april
    run`.
    """
    from april.broker.plan import advice, describe_plan
    from april.launch import preflight
    from april.launch.devices import describe_placement, numa_nodes, place_parts, visible_devices
    from april.launch.memory import with_memory_limits
    from april.launch.rehearsal import STARTING_S
    from april.launch.supervisor import RunFailed, Supervisor
    from april.observe.report.live import LiveView
    from april.util.files import keep_private

    devices = visible_devices()
    config = with_memory_limits(config, devices)
    keep_private(config.run_dir)
    with contextlib.ExitStack() as folder:
        changes = []
        if resume:
            folder.enter_context(preflight.lock_run_folder(config))
            changes = preflight.check_resume(config, accept_loss)
            if over := preflight.nothing_left(config):
                print(over)
                return 0
        found = preflight.examine(config, devices, STARTING_S, has_learner=not without_learner)
        found.refuse()
        placed = place_parts(config, devices)
        if not resume:
            config = preflight.make_run_folder(config)
            folder.enter_context(preflight.lock_run_folder(config))
        failure = ""
        with LiveView() as view:
            view.note(describe_plan(config.schedule))
            if why_automatic:
                view.note(f"      {why_automatic}")
            if advised := advice(config):
                view.note(f"      {advised}")
            for line in (*found.lines(), *map("remark: {}".format, found.warnings)):
                view.note(line)
            for line in describe_placement(placed, numa_nodes(devices)):
                view.note(f"accelerators of {line}")
            if resume:
                preflight.note_resume(config.run_dir, changes)
            for change in changes:
                view.note(change)
            try:
                state = Supervisor(config, view, placed, has_learner=not without_learner).run()
            except RunFailed as error:
                state, failure = "failed", str(error)
        if failure:
            print(f"april run: {failure}", file=sys.stderr)
        report_end(config.run_dir, state, failure)
    for status, fault in ((TOO_MANY_FAILED, preflight.too_many_failed), (TRAINED_NOTHING, preflight.trained_nothing)):
        if state == "finished" and (why := fault(config)):
            print(f"april run: {why}", file=sys.stderr)
            return status
    return {"finished": 0, "stopped": INTERRUPTED, "failed": 1}[state]


def describe_run(
    files: list[Path], hardware: int | None, resume: bool, without_learner: bool, overrides: list[str]
) -> int:
    """Print what a run would start and need, and each error that would keep it from starting; returns the exit status.
    `hardware`: number of accelerators to assume, None for this machine's; the others as for `april run`."""
    from april.config.hub import Fetcher
    from april.launch.devices import visible_devices
    from april.launch.dry_run import describe, indented
    from april.launch.findings import LABEL_WIDTH
    from april.launch.preflight import examine
    from april.launch.rehearsal import DRY_S
    from april.simulate.tune import resolve

    fetcher = Fetcher("tokenizer", "rows")
    config = load_config(files, overrides, inputs=(), fetch=fetcher, resumed=resume)
    with tempfile.TemporaryDirectory() as folder:
        config, why_automatic = resolve(config, resume, Path(folder))
    devices = visible_devices() if hardware is None else list(map(str, range(hardware)))
    print(describe(config, devices))
    if fetcher.facts:
        print(f"{'hub':{LABEL_WIDTH}}{indented(fetcher.facts)}")
    found = examine(config, devices, DRY_S, everything=True, has_learner=not without_learner)
    found.run_check(check_trainer, config, without_learner)
    for line in (*found.lines(), *([f"auto       {why_automatic}"] if why_automatic else [])):
        print(line)
    for kind, sentences in (("remark", found.warnings), ("missing", found.errors)):
        for sentence in sentences:
            print(f"{kind}: {sentence}")
    print("something is missing" if found.errors else "nothing is missing")
    return REFUSED if found.errors else 0


def check_trainer(config: "Config", without_learner: bool) -> None:
    """Refuse a run in which April's learner trains (`without_learner` is false) if training prompts or weights come
    from an external trainer."""
    from april.util.registry import registry_of

    transport = registry_of("weights.transport").find(config.weights.transport)
    if not (transport.carries_weights or without_learner):
        refuse(
            "weights.transport",
            config.weights.transport,
            "waits for a trainer whose framework loads weights into the servers, which April's learner does not",
            "start yours with april.connect, or leave the key out",
        )
    if config.data.source == "submitted" and not without_learner:
        refuse(
            "data.source",
            "submitted",
            "waits for a trainer that brings prompts, which April's learner does not",
            "start yours with april.connect, or leave the key out",
        )


def report_end(run_dir: Path, state: str, why: str) -> None:
    """Record how the run ended, print its status and write its report; if one of these fails, a line says so, and the
    run's exit status stays as it is. `state`: finished, stopped or failed; `why`: reason of a failure, otherwise
    empty."""
    from april.launch.preflight import mark_ended
    from april.observe.dashboard.report import write_report
    from april.observe.report.operations import print_status

    try:
        mark_ended(run_dir, state, why)
        if (run_dir / "metrics.jsonl").exists():
            print_status(run_dir)
            print(f"report: {write_report(run_dir)}")
    except Exception as error:
        print(f"april run: no report: {error}; mend that, then `april report {run_dir}`", file=sys.stderr)
