"""What each subcommand of `april` does. Each returns its exit status, and raises ConfigError for what is wrong."""

import contextlib
import logging
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from april import config as configuration
from april.config import ConfigError
from april.config.checks import check_schedule
from april.config.naming import is_shipped
from april.processes.lifetime import REFUSED, RUN_FAILED, STEPPED_ASIDE
from april.registry import look_in, registry_of

INTERRUPTED = 130
"""exit status of a run that was stopped by the user"""
TOO_MANY_FAILED = 4
"""exit status of a run that has finished while more of its prompts than reward.max_failed_share have failed"""
BROKERS_PARTS = ("schedule.kind", "schedule.group_filter", "operations.sinks", "operations.alarms")
"""keys that name what a broker imports, which may be somebody's own and may want torch"""
PIPED_COLUMNS = 10_000
"""of what does not go to a terminal, so that no line of it is cut"""


def run_command(options, overrides: list[str]) -> int:
    if options.dry_run:
        return dry_run_command(options, overrides)
    if options.accept_loss and not options.resume:
        raise ConfigError("option '--accept-loss' is for a run that goes on; give --resume with it")
    from april.broker.plan import advice, describe_plan
    from april.launch import preflight
    from april.launch.devices import describe_placement, numa_nodes, place, visible_devices
    from april.launch.memory import bounded
    from april.launch.rehearsal import STARTING_S
    from april.launch.supervisor import RunFailed, Supervisor
    from april.processes.lifetime import die_with_parent
    from april.report.live import LiveView
    from april.simulate.automatic import resolve

    if options.without_learner:
        die_with_parent()
    config, why = resolve(load_config(options.config, overrides), resumed=options.resume)
    check_trainer(config, options.without_learner)
    devices = visible_devices()
    config = bounded(config, devices)
    with contextlib.ExitStack() as folder:
        changes = []
        if options.resume:
            folder.enter_context(preflight.held(config))
            changes = preflight.check_resume(config, options.accept_loss)
        found = preflight.examine(config, devices, STARTING_S)
        found.refuse()
        placed = place(config, devices)
        if not options.resume:
            config = preflight.make_run_folder(config)
            folder.enter_context(preflight.held(config))
        failure = ""
        with LiveView() as view:
            view.note(describe_plan(config.schedule))
            if why:
                view.note(f"      {why}")
            if advised := advice(config):
                view.note(f"      {advised}")
            for line in (*found.lines(), *map("remark: {}".format, found.remarks)):
                view.note(line)
            for line in describe_placement(placed, numa_nodes(devices)):
                view.note(f"accelerators of {line}")
            if options.resume:
                preflight.note_resume(config.run_dir, changes)
            for change in changes:
                view.note(change)
            try:
                state = Supervisor(config, view, placed, trains=not options.without_learner).run()
            except RunFailed as error:
                state, failure = "failed", str(error)
        if failure:
            print(f"april run: {failure}", file=sys.stderr)
        report_end(config.run_dir, state, failure)
    if state == "finished" and (why := preflight.too_many_failed(config)):
        print(f"april run: {why}", file=sys.stderr)
        return TOO_MANY_FAILED
    return {"finished": 0, "stopped": INTERRUPTED, "failed": 1}[state]


def launch_command(options, overrides: list[str]) -> int:
    from april.launch.clusters import command

    first, *rest = options.words
    if first in command.VERBS:
        print(command.look_after(first, rest))
        return 0
    on = ["--launch.on", options.on] if options.on else []
    look_in(*(Path(word).parent for word in options.words))
    print(command.launch([Path(word) for word in options.words], [*overrides, *on], options.dry_run, options.resume))
    return 0


def part_command(options, overrides: list[str]) -> int:
    from april.launch.part import Across, keep

    config = configuration.load(options.config, overrides, inputs=())
    across = Across(options.nodes, options.node, options.meeting) if options.nodes > 1 else None
    files = [str(path) for path in options.config]
    return keep(
        options.role, config, [*files, *overrides], options.connect, options.name, options.restarts, across,
        options.accelerators,
    )  # fmt: skip


def quickstart_command(options, overrides: list[str]) -> int:
    from april.launch import quickstart

    options.config = [quickstart.CONFIG]
    if not options.dry_run:
        quickstart.prepare()
    here = [word for key, path in quickstart.INPUTS.items() for word in (f"--{key}", str(path))]
    return run_command(options, here + overrides)


def dry_run_command(options, overrides: list[str]) -> int:
    from april.launch.devices import visible_devices
    from april.launch.dry_run import describe
    from april.launch.preflight import examine
    from april.launch.rehearsal import DRY_S
    from april.simulate.automatic import resolve

    config = load_config(options.config, overrides, inputs=())
    with tempfile.TemporaryDirectory() as folder:
        config, why = resolve(config, options.resume, Path(folder))
    devices = visible_devices() if options.hardware is None else list(map(str, range(options.hardware)))
    print(describe(config, devices))
    found = examine(config, devices, DRY_S)
    found.passes(check_trainer, config, options.without_learner)
    for line in (*found.lines(), *([f"auto       {why}"] if why else [])):
        print(line)
    for kind, sentences in (("remark", found.remarks), ("missing", found.objections)):
        for sentence in sentences:
            print(f"{kind}: {sentence}")
    print("something is missing" if found.objections else "nothing is missing")
    return REFUSED if found.objections else 0


def broker_command(options, overrides: list[str]) -> int:
    from april.broker.journal.files import JournalError
    from april.broker.server import BindError, Server
    from april.data.tokenizer import import_without_torch
    from april.processes.lifetime import die_with_parent
    from april.processes.logs import log_to_stderr
    from april.simulate.automatic import resolve_as_recorded

    die_with_parent()
    config = load_config(options.config, overrides)
    check_schedule(config.schedule)
    config, why = resolve_as_recorded(config)
    log_to_stderr("broker", config.operations.log_format, run=config.run.name)
    if all(is_shipped(config, key) for key in BROKERS_PARTS):
        import_without_torch()
    if why:
        logging.getLogger(__name__).info(why)
    try:
        server = Server(config)
    except (JournalError, BindError) as error:
        print(f"april broker: {error}", file=sys.stderr)
        return 1 if getattr(error, "errno", None) else REFUSED
    try:
        server.serve()
    except JournalError as error:
        print(f"april broker: {error}", file=sys.stderr)
        return 1
    if server.steps_aside:
        return STEPPED_ASIDE
    if server.service.run.state == "failed":
        print(f"april broker: the run has failed: {server.service.run.over}", file=sys.stderr)
        return RUN_FAILED
    return 0


def worker_command(options, overrides: list[str]) -> NoReturn:
    from april.processes.lifetime import die_with_parent
    from april.workers.process import run_worker

    die_with_parent()
    config = load_config(options.config, overrides, inputs=["model"])
    run_worker(config, configuration.check_address(options.connect), options.name)


def scorer_command(options, overrides: list[str]) -> NoReturn:
    from april.processes.lifetime import die_with_parent
    from april.workers.process import run_scorer

    die_with_parent()
    config = load_config(options.config, overrides, inputs=["model"])
    run_scorer(config, configuration.check_address(options.connect), options.name)


def agents_command(options, overrides: list[str]) -> NoReturn:
    from april.agents.process import run_agents
    from april.processes.lifetime import die_with_parent

    die_with_parent()
    config = load_config(options.config, overrides, inputs=["model"])
    run_agents(config, configuration.check_address(options.connect), options.name)


def status_command(options, overrides: list[str]) -> int:
    from rich.console import Console

    from april.connections.broker import BrokerRefused, BrokerUnreachable
    from april.report.operations import render_live

    try:
        Console().print(render_live(target_of(options).status()))
    except (BrokerRefused, BrokerUnreachable) as error:
        if options.run is None:
            print(f"april status: {error}", file=sys.stderr)
            return 1
        print(f"no broker answers ({error}); the run folder says:")
    if options.run:
        print_status(options.run)
    return 0


def drain_command(options, overrides: list[str]) -> int:
    from april import wire
    from april.connections.broker import BrokerRefused, BrokerUnreachable

    try:
        target_of(options).ask(wire.Drain(not options.end))
    except (BrokerRefused, BrokerUnreachable) as error:
        print(f"april drain: {error}", file=sys.stderr)
        return 1
    print("work is handed out again" if options.end else "draining; `april status` says when nothing is leased")
    return 0


def dead_letters_command(options, overrides: list[str]) -> int:
    from april import wire
    from april.connections.broker import BrokerRefused, BrokerUnreachable
    from april.report.operations import render_dead_letters

    wanted = options.requeue
    if wanted and wanted != "all" and not wanted.isdecimal():
        raise ConfigError(f"option '--requeue' = {wanted!r} is no group; give the number of one, or all")
    try:
        if wanted:
            groups = [] if wanted == "all" else [int(wanted)]
            answer = target_of(options).ask(wire.Requeue(groups))
            print(f"re-queued: {', '.join(map(str, answer.message.groups)) or 'none that was not already'}")
            return 0
        listed, live = target_of(options).dead_letters()
    except (BrokerRefused, BrokerUnreachable) as error:
        print(f"april dead-letters: {error}", file=sys.stderr)
        return 1
    uncut().print(render_dead_letters(listed))
    if not live:
        print("no broker answers; this is what the last one left in the run folder")
    return 0


def report_command(options, overrides: list[str]) -> int:
    from april.report.html import write_report

    print(write_report(options.run))
    return 0


def dashboard_command(options, overrides: list[str]) -> int:
    from april.dashboard.command import serve

    return serve(options)


def samples_command(options, overrides: list[str]) -> int:
    from april.report.run_folder import read_run
    from april.report.samples import pick, read_step, render_samples

    for flag in ("worst", "best"):
        if (number := getattr(options, flag)) is not None and number < 1:
            raise ConfigError(f"option '--{flag}' = {number} shows nothing; give how many samples to show, from 1 on")
    kept = read_step(read_run(options.run).path, options.step)
    uncut().print(render_samples(pick(kept, options.worst, options.best, options.group)))
    return 0


def simulate_command(options, overrides: list[str]) -> int:
    from april.simulate import command

    scenario = command.read_decided(options.scenario, options.cost, overrides)
    kind = command.asked_for(overrides)
    if options.experiment:
        command.experiment(options.experiment, scenario, options.out, kind)
    elif options.sweep:
        command.sweep(scenario, options.out, kind)
    else:
        command.compare(scenario, kind)
    return 0


def tune_command(options, overrides: list[str]) -> int:
    from april.simulate import command

    scenario = command.read(options.scenario, options.cost, overrides, options.trace)
    command.choose(scenario, options.mean_staleness)
    return 0


def trace_command(options, overrides: list[str]) -> int:
    if options.what == "export":
        from april.report.perfetto import export
        from april.report.run_folder import read_run

        tracks = export(read_run(options.run), Path(options.out))
        print(f"{options.out} has {tracks} tracks; open it at https://ui.perfetto.dev")
        return 0
    if options.what == "send":
        from april.report.run_folder import read_run

        try:
            from april.report.spans import send
        except ImportError as error:
            raise ConfigError(f"sending needs the package {error.name}; `pip install 'april-rl[otel]'`") from None
        print(f"{send(read_run(options.run), options.out)} traces were sent to {options.out}")
        return 0
    from april.simulate import command

    command.trace(options.run, Path(options.out))
    return 0


def calibrate_command(options, overrides: list[str]) -> int:
    from april.simulate import command

    command.calibrate(options.model, options.slots, options.out, overrides)
    return 0


def check_command(options, overrides: list[str]) -> int:
    if not __debug__:
        raise ConfigError("checks are assertions, which `python -O` leaves out; run it without -O")
    fell_short = run_checks(options.kind, options.part, overrides)
    print(f"{fell_short} checks fell short" if fell_short else "it keeps to everything that was checked")
    return 1 if fell_short else 0


def run_checks(kind: str, part: str, overrides: list[str]) -> int:
    """How many fell short."""
    try:
        if kind == "engine":
            from april.workers.engines.conformance.suite import check_engine_named

            run = check_engine_named
        else:
            from april.broker.conformance.suite import check_schedule_named

            run = check_schedule_named
    except ImportError as error:
        raise ConfigError(
            f"checking needs the package {error.name}, which is not installed; run `pip install 'april-rl[check]'`"
        ) from None
    return run(part, overrides, lambda line: print(line, flush=True))


def convert_command(options, overrides: list[str]) -> int:
    from april.convert.command import convert

    return convert(options.framework, options.script, options.out, options.set, overrides)


def keygen_command(options, overrides: list[str]) -> int:
    from april.security import keygen

    if bool(options.role) != bool(options.name):
        raise ConfigError("options '--role' and '--name' go together; give both for one more peer, or none of them")
    paths = [keygen.add_peer(options.folder, options.role, options.name)] if options.name else None
    for path in paths or keygen.make_folder(options.folder):
        print(path)
    return 0


def convert_weights_command(options, overrides: list[str]) -> int:
    from april.learner.convert_weights import convert

    what = convert(options.source, options.to, options.step, options.model, options.out)
    print(f"{what} is in {options.out}")
    return 0


def make_policy_command(options, overrides: list[str]) -> int:
    from april.policy.make_policy import make_policy

    make_policy(options.out, options.seed)
    return 0


def make_data_command(options, overrides: list[str]) -> int:
    from april.data.make_data import make_data

    for path in make_data(options.out, options.train, options.heldout, options.seed):
        print(path)
    return 0


def verifiers_command(options, overrides: list[str]) -> int:
    from april.agents.verifiers import write_rows

    out = options.out or Path("cache", options.name.replace("/", "-"))
    for path in write_rows(options.name, options.arguments, out, options.most):
        print(path)
    return 0


# --- helpers ------------------------------------------------------------------------------------------------


def load_config(*arguments, **named) -> configuration.Config:
    """As `april.config.load`; where it says that parts of one's own are, they are found from now on."""
    config = configuration.load(*arguments, **named)
    look_in(*config.run.parts)
    return config


def check_trainer(config: configuration.Config, without_learner: bool) -> None:
    """Refuse prompts or weights that nobody would bring. Raises ConfigError."""
    transport = registry_of("weights.transport").find(config.weights.transport)
    if not (transport.brings or without_learner):
        raise ConfigError(
            f"key 'weights.transport' = {config.weights.transport!r} waits for a trainer whose framework loads weights "
            "into the servers, which April's learner does not; start yours with april.connect, or leave the key out"
        )
    if config.data.source == "submitted" and not without_learner:
        raise ConfigError(
            "key 'data.source' = 'submitted' waits for a trainer that brings prompts, which April's learner does not; "
            "start yours with april.connect, or leave the key out"
        )


def uncut():
    """A console whose lines are cut by nothing but a terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=PIPED_COLUMNS)


def target_of(options):
    from april.launch.operate import Target

    return Target(options.run, options.connect, options.keys)


def report_end(run_dir: Path, state: str, why: str) -> None:
    """Show and write what became of a run; what keeps that from being done says nothing of how the run ended."""
    from april.launch.preflight import mark_ended
    from april.report.html import write_report

    try:
        mark_ended(run_dir, state, why)
        if (run_dir / "metrics.jsonl").exists():
            print_status(run_dir)
            print(f"report: {write_report(run_dir)}")
    except Exception as error:
        print(f"april run: no report: {error}; mend that, then `april report {run_dir}`", file=sys.stderr)


def print_status(run_dir: Path) -> None:
    from rich.console import Console

    from april.report.run_folder import read_run
    from april.report.table import render_status

    Console().print(render_status(read_run(run_dir)))
