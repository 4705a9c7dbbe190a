"""The `april` command: its subcommands, their options, and errors as sentences."""

import argparse
import contextlib
import logging
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from april import __version__
from april import config as configuration
from april.config import ConfigError
from april.config.checks import check_schedule
from april.processes.lifetime import REFUSED, RUN_FAILED
from april.registry import look_in
from april.security.keys import ROLES

INTERRUPTED = 130
"""exit status of a run that was stopped by the user"""
PIPED_COLUMNS = 10_000
"""of what does not go to a terminal, so that no line of it is cut"""


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options, overrides = parser.parse_known_args(arguments)
    look_in(*(path.parent for path in getattr(options, "config", [])))
    if overrides and not options.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        return options.command(options, overrides)
    except ConfigError as error:
        print(f"april {options.name}: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="april", description="RL of language models with active partial rollouts.")
    parser.add_argument("--version", action="version", version=f"april {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    run = add(commands, "run", run_command, "train: start all parts on this machine, and watch them", config=True)
    quickstart = add(
        commands, "quickstart", quickstart_command, "make a tiny policy and prompts in ./cache, and train it",
        overrides=True,
    )  # fmt: skip
    for parser_of_run in (run, quickstart):
        parser_of_run.add_argument(
            "--dry-run", action="store_true", help="only say what would run, what it needs and what is missing"
        )
        parser_of_run.add_argument(
            "--resume", action="store_true", help="go on with the run folder of that name [default off]"
        )
    run.add_argument(
        "--without-learner", action="store_true", help="broker and workers, for a trainer of your own [default off]"
    )
    quickstart.set_defaults(without_learner=False)

    add(commands, "broker", broker_command, "the broker of a run alone", config=True)

    worker = add(commands, "worker", worker_command, "one generation worker", config=True)
    worker.add_argument("--connect", required=True, metavar="ADDRESS", help="the broker's, as tcp://HOST:PORT")
    name = f"{socket.gethostname()}-{os.getpid()}"
    worker.add_argument("--name", default=name, help="unique among the run's workers [default HOST-PID]")

    scorer = add(commands, "scorer", scorer_command, "one scorer, where reward.where = 'scorer'", config=True)
    scorer.add_argument("--connect", required=True, metavar="ADDRESS", help="the broker's, as tcp://HOST:PORT")
    scorer.add_argument("--name", default=name, help="unique among the run's scorers [default HOST-PID]")

    agents = add(commands, "agents", agents_command, "one agents process, where [agent] names one", config=True)
    agents.add_argument("--connect", required=True, metavar="ADDRESS", help="the broker's, as tcp://HOST:PORT")
    agents.add_argument("--name", default=name, help="unique among the run's agents processes [default HOST-PID]")

    report = add(commands, "report", report_command, "write the report of a run, one HTML file")
    report.add_argument("run", type=Path, help="a run folder, such as runs/quickstart")

    samples = add(commands, "samples", samples_command, "what the policy said: samples of a run, with their rewards")
    samples.add_argument("run", type=Path, help="a run folder, such as runs/quickstart")
    samples.add_argument("--step", type=int, help="of this step, as in metrics.jsonl [default the newest that is kept]")
    samples.add_argument("--worst", type=int, metavar="N", help="those with the lowest rewards [default all]")
    samples.add_argument("--best", type=int, metavar="N", help="those with the highest rewards [default all]")
    samples.add_argument("--group", type=int, metavar="G", help="of this group alone [default of all]")

    add_operation(commands, "status", status_command, "the state of a run, of its broker if one answers")
    drain = add_operation(commands, "drain", drain_command, "for maintenance: have all work handed back, give out none")
    drain.add_argument("--end", action="store_true", help="go on handing out work [default off]")
    letters = add_operation(commands, "dead-letters", dead_letters_command, "list samples that failed for good")
    letters.add_argument(
        "--requeue", metavar="GROUP|all", help="draw the prompt of a discarded group again [default none]"
    )

    simulate = add(
        commands, "simulate", simulate_command, "plan a run on a virtual clock: schedules compared", overrides=True
    )
    add_scenario(simulate)
    simulate.add_argument(
        "--sweep", action="store_true", help="over-sampling, in flight, staleness, engines [default off]"
    )
    simulate.add_argument(
        "--experiment",
        choices=("lengths", "buffers", "versions"),
        help="one of: response lengths; N' against the largest buffer; trained tokens by age [default none]",
    )
    simulate.add_argument("--out", type=Path, default=Path("simulated"), help="of pictures [default simulated]")
    tune = add(commands, "tune", tune_command, "choose N' or the samples in flight, and say why", overrides=True)
    add_scenario(tune)
    tune.add_argument("--mean-staleness", type=float, help="largest of the mean over trained tokens [default none]")
    tune.add_argument("--trace", type=Path, help="lengths from this file of `april trace` [default the scenario's]")
    trace = add(commands, "trace", trace_command, "write the response lengths of a run as a trace")
    trace.add_argument("run", type=Path, help="a run folder, such as runs/quickstart")
    trace.add_argument("--out", type=Path, required=True, help="JSONL file")
    calibrate = add(
        commands, "calibrate", calibrate_command, "measure an engine, and fit the simulator's cost model",
        overrides=True,
    )  # fmt: skip
    calibrate.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    calibrate.add_argument("--slots", type=int, default=64, help="sequences decoded together [default 64]")
    calibrate.add_argument("--out", type=Path, default=Path("cost.toml"), help="[cost] section [default cost.toml]")

    check = add(
        commands, "check", check_command, "hold an engine or a schedule to what all of them keep", overrides=True
    )
    check.add_argument("kind", choices=("engine", "schedule"), help="of part")
    check.add_argument("part", metavar="NAME", help="a shipped one's, or package.module:Class for your own")

    keygen = add(commands, "keygen", keygen_command, "make the keys of a run, or those of one more peer")
    keygen.add_argument("folder", type=Path, metavar="KEYS", help="folder of the keys and the allow-list")
    keygen.add_argument("--role", choices=ROLES, help="of one more peer [default: all keys]")
    keygen.add_argument("--name", help="of that peer and its key file, unique in the allow-list")

    policy = add(commands, "make-policy", make_policy_command, "make the quickstart's policy (about a minute, cached)")
    policy.add_argument("--out", type=Path, default=Path("cache/policy"), help="folder [default cache/policy]")
    policy.add_argument("--seed", type=int, default=0, help="of weights and demonstrations [default 0]")

    data = add(commands, "make-data", make_data_command, "write the quickstart's prompts")
    data.add_argument("--out", type=Path, default=Path("cache/data"), help="folder [default cache/data]")
    data.add_argument("--train", type=int, default=4096, help="training prompts [default 4096]")
    data.add_argument("--heldout", type=int, default=512, help="held-out prompts [default 512]")
    data.add_argument("--seed", type=int, default=0, help="of the draw [default 0]")
    return parser


def add_operation(commands, name: str, command, help: str) -> argparse.ArgumentParser:
    """A subcommand about one run, by its folder or by its broker's address."""
    parser = add(commands, name, command, help)
    parser.add_argument("run", type=Path, nargs="?", help="a run folder, such as runs/quickstart")
    parser.add_argument("--connect", metavar="ADDRESS", help="its broker's, as tcp://HOST:PORT [default the folder's]")
    parser.add_argument(
        "--security.keys", dest="keys", type=Path, metavar="KEYS", help="of a monitor [default the run's own]"
    )
    return parser


def add_scenario(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, help="TOML file, such as configs/published.toml")
    parser.add_argument("--cost", help="cost model: of the file's [costs] or April's own [default the first]")


def add(
    commands, name: str, command, help: str, config: bool = False, overrides: bool = False
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=configuration.OVERRIDES + configuration.describe_keys() if config else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=command, takes_overrides=config or overrides)
    if config:
        parser.add_argument("config", type=Path, nargs="+", help="TOML file of the run; of several, later ones win")
    return parser


# --- commands -----------------------------------------------------------------------------------------------


def run_command(options, overrides: list[str]) -> int:
    if options.dry_run:
        return dry_run_command(options, overrides)
    from april.broker.plan import advice, describe_plan
    from april.launch import preflight
    from april.launch.devices import describe_placement, place, visible_devices
    from april.launch.supervisor import RunFailed, Supervisor
    from april.processes.lifetime import die_with_parent
    from april.report.live import LiveView
    from april.simulate.automatic import resolve

    if options.without_learner:
        die_with_parent()
    config, why = resolve(configuration.load(options.config, overrides), resumed=options.resume)
    with contextlib.ExitStack() as folder:
        changes = []
        if options.resume:
            folder.enter_context(preflight.held(config))
            changes = preflight.check_resume(config)
        preflight.check_inputs(config)
        placed = place(config, visible_devices())
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
            for line in describe_placement(placed):
                view.note(f"accelerators of {line}")
            for change in changes:
                view.note(f"resumed with a changed key: {change}")
            try:
                state = Supervisor(config, view, placed, trains=not options.without_learner).run()
            except RunFailed as error:
                state, failure = "failed", str(error)
        if failure:
            print(f"april run: {failure}", file=sys.stderr)
        report_end(config.run_dir, state, failure)
    return {"finished": 0, "stopped": INTERRUPTED, "failed": 1}[state]


def quickstart_command(options, overrides: list[str]) -> int:
    from april.launch import quickstart

    options.config = [quickstart.CONFIG]
    if not options.dry_run:
        quickstart.prepare()
    return run_command(options, overrides)


def dry_run_command(options, overrides: list[str]) -> int:
    from april.launch.dry_run import LABEL_WIDTH, describe, missing
    from april.simulate.automatic import resolve

    config = configuration.load(options.config, overrides, inputs=())
    with tempfile.TemporaryDirectory() as folder:
        config, why = resolve(config, options.resume, Path(folder))
    print(describe(config))
    if why:
        print(f"{'auto':{LABEL_WIDTH}}{why}")
    lacking = missing(config)
    for sentence in lacking:
        print(f"missing: {sentence}")
    print("something is missing" if lacking else "nothing is missing")
    return REFUSED if lacking else 0


def broker_command(options, overrides: list[str]) -> int:
    from april.broker.journal.journal import JournalError
    from april.broker.server import BindError, Server
    from april.processes.lifetime import die_with_parent
    from april.processes.logs import log_to_stderr
    from april.simulate.automatic import resolve_as_recorded

    die_with_parent()
    config = configuration.load(options.config, overrides)
    check_schedule(config.schedule)
    config, why = resolve_as_recorded(config)
    log_to_stderr("broker", config.operations.log_format, run=config.run.name)
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
        return 1
    if server.service.run.state == "failed":
        print(f"april broker: the run has failed: {server.service.run.over}", file=sys.stderr)
        return RUN_FAILED
    return 0


def worker_command(options, overrides: list[str]) -> NoReturn:
    from april.processes.lifetime import die_with_parent
    from april.workers.process import run_worker

    die_with_parent()
    config = configuration.load(options.config, overrides, inputs=["model"])
    run_worker(config, configuration.check_address(options.connect), options.name)


def scorer_command(options, overrides: list[str]) -> NoReturn:
    from april.processes.lifetime import die_with_parent
    from april.workers.process import run_scorer

    die_with_parent()
    config = configuration.load(options.config, overrides, inputs=["model"])
    run_scorer(config, configuration.check_address(options.connect), options.name)


def agents_command(options, overrides: list[str]) -> NoReturn:
    from april.agents.process import run_agents
    from april.processes.lifetime import die_with_parent

    die_with_parent()
    config = configuration.load(options.config, overrides, inputs=["model"])
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
    from april.simulate import command

    command.trace(options.run, options.out)
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


def keygen_command(options, overrides: list[str]) -> int:
    from april.security import keygen

    if bool(options.role) != bool(options.name):
        raise ConfigError("options '--role' and '--name' go together; give both for one more peer, or none of them")
    paths = [keygen.add_peer(options.folder, options.role, options.name)] if options.name else None
    for path in paths or keygen.make_folder(options.folder):
        print(path)
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


# --- helpers ------------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    sys.exit(main())
