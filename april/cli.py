"""The `april` command: its subcommands, their options, and errors as sentences."""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from april import __version__
from april import config as configuration
from april.config import ConfigError
from april.process import REFUSED, RUN_FAILED

INTERRUPTED = 130
"""exit status of a run that was stopped by the user"""


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options, overrides = parser.parse_known_args(arguments)
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

    run = add(commands, "run", run_command, "train: start broker, workers and learner on this machine", config=True)
    run.add_argument("--resume", action="store_true", help="go on with the run folder of that name [default off]")

    add(commands, "broker", broker_command, "the broker of a run alone", config=True)

    worker = add(commands, "worker", worker_command, "one generation worker", config=True)
    worker.add_argument("--connect", required=True, metavar="ADDRESS", help="the broker's, as tcp://HOST:PORT")
    name = f"{socket.gethostname()}-{os.getpid()}"
    worker.add_argument("--name", default=name, help="unique among the run's workers [default HOST-PID]")

    for name, command, help in (
        ("status", status_command, "the state of a run: steps, rewards, ledger"),
        ("report", report_command, "write the report of a run, one HTML file"),
    ):
        add(commands, name, command, help).add_argument("run", type=Path, help="a run folder, such as runs/quickstart")

    policy = add(commands, "make-policy", make_policy_command, "make the quickstart's policy (about a minute, cached)")
    policy.add_argument("--out", type=Path, default=Path("cache/policy"), help="folder [default cache/policy]")
    policy.add_argument("--seed", type=int, default=0, help="of weights and demonstrations [default 0]")

    data = add(commands, "make-data", make_data_command, "write the quickstart's prompts")
    data.add_argument("--out", type=Path, default=Path("cache/data"), help="folder [default cache/data]")
    data.add_argument("--train", type=int, default=4096, help="training prompts [default 4096]")
    data.add_argument("--heldout", type=int, default=512, help="held-out prompts [default 512]")
    data.add_argument("--seed", type=int, default=0, help="of the draw [default 0]")
    return parser


def add(commands, name: str, command, help: str, config: bool = False) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=configuration.OVERRIDES + configuration.describe_keys() if config else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=command, takes_overrides=config)
    if config:
        parser.add_argument("config", type=Path, help="TOML file of the run")
    return parser


# --- commands -----------------------------------------------------------------------------------------------


def run_command(options, overrides: list[str]) -> int:
    from april import preflight
    from april.broker.plan import describe_plan
    from april.report.html import write_report
    from april.report.live import LiveView
    from april.supervisor import RunFailed, Supervisor

    config = configuration.load(options.config, overrides)
    changes = preflight.check_resume(config) if options.resume else []
    preflight.check_inputs(config)
    if not options.resume:
        config = preflight.make_run_folder(config)
    failure = ""
    with LiveView() as view:
        view.note(describe_plan(config.schedule))
        for change in changes:
            view.note(f"resumed with a changed key: {change}")
        try:
            state = Supervisor(config, view).run()
        except RunFailed as error:
            state, failure = "failed", str(error)
    preflight.mark_ended(config.run_dir, state)
    if (config.run_dir / "metrics.jsonl").exists():
        print_status(config.run_dir)
        print(f"report: {write_report(config.run_dir)}")
    if failure:
        print(f"april run: {failure}", file=sys.stderr)
    return {"finished": 0, "stopped": INTERRUPTED, "failed": 1}[state]


def broker_command(options, overrides: list[str]) -> int:
    from april.broker.journal import JournalError
    from april.broker.server import BindError, Server
    from april.process import die_with_parent, log_to_stderr

    die_with_parent()
    log_to_stderr("broker")
    try:
        server = Server(configuration.load(options.config, overrides))
    except (JournalError, BindError) as error:
        print(f"april broker: {error}", file=sys.stderr)
        return 1 if getattr(error, "errno", None) else REFUSED
    try:
        server.serve()
    except JournalError as error:
        print(f"april broker: {error}", file=sys.stderr)
        return 1
    if server.service.state == "failed":
        print(f"april broker: the run has failed: {server.service.over}", file=sys.stderr)
        return RUN_FAILED
    return 0


def worker_command(options, overrides: list[str]) -> NoReturn:
    from april.process import die_with_parent
    from april.workers.process import run_worker

    die_with_parent()
    config = configuration.load(options.config, overrides)
    run_worker(config, configuration.check_address(options.connect), options.name)


def status_command(options, overrides: list[str]) -> int:
    print_status(options.run)
    return 0


def report_command(options, overrides: list[str]) -> int:
    from april.report.html import write_report

    print(write_report(options.run))
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


def print_status(run_dir: Path) -> None:
    from rich.console import Console

    from april.report.run_folder import read_run
    from april.report.table import render_status

    Console().print(render_status(read_run(run_dir)))


if __name__ == "__main__":
    sys.exit(main())
