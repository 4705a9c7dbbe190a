"""The `april` command: its subcommands, their options, and errors as sentences."""

import argparse
import errno
import json
import os
import socket
import sys
from pathlib import Path

from april import __version__, actions
from april import config as configuration
from april.actions import INTERRUPTED
from april.config import ConfigError
from april.dashboard.command import add_options as add_dashboard_options
from april.processes.lifetime import REFUSED
from april.registry import look_in
from april.security.keys import ROLES

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
BROKER = "the broker's, as tcp://HOST:PORT, or its run folder"


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options, overrides = parser.parse_known_args(arguments)
    look_in()
    if overrides and not options.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        return options.command(options, overrides)
    except ConfigError as error:
        print(f"april {options.name}: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        where = error.filename or getattr(options, "run", None) or "a file"
        print(f"april {options.name}: {where} cannot be written ({error.strerror}); make room there", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="april", description="RL of language models with active partial rollouts.")
    parser.add_argument("--version", action="version", version=f"april {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    run = add(
        commands, "run", actions.run_command, "train: start all parts on this machine, and watch them", config=True
    )
    quickstart = add(
        commands, "quickstart", actions.quickstart_command, "make a tiny policy and prompts in ./cache, and train it",
        overrides=True,
    )  # fmt: skip
    for parser_of_run in (run, quickstart):
        parser_of_run.add_argument(
            "--dry-run", action="store_true", help="only say what would run, what it needs and what is missing"
        )
        parser_of_run.add_argument(
            "--hardware", type=int, metavar="N", help="a dry run plans for N accelerators [default what is here]"
        )
        parser_of_run.add_argument(
            "--resume", action="store_true", help="go on with the run folder of that name [default off]"
        )
        parser_of_run.add_argument(
            "--accept-loss",
            action="store_true",
            help="with --resume: go on without what the journal has lost of its end [default off]",
        )
    run.add_argument(
        "--without-learner", action="store_true", help="broker and workers, for a trainer of your own [default off]"
    )
    quickstart.set_defaults(without_learner=False)

    launch = add(
        commands, "launch", actions.launch_command, "train on a cluster, or look after such a run", overrides=True
    )  # fmt: skip
    launch.add_argument(
        "words", nargs="+", metavar="CONFIG", help="or: status RUN, logs RUN [PART], stop RUN, scale RUN workers=N"
    )
    launch.add_argument("--on", help="local, ssh, slurm, kubernetes, ray, or yours [default launch.on]")
    launch.add_argument("--dry-run", action="store_true", help="only show what would be submitted")
    launch.add_argument("--resume", action="store_true", help="go on with the run folder of that name [default off]")

    part = add(commands, "part", actions.part_command, "one part of a run, kept alive on this machine", overrides=True)
    part.add_argument("role", choices=("broker", "learner", "worker", "scorer", "agents"), help="what it is")
    part.add_argument("config", type=Path, nargs="+", help="TOML file of the run; of several, later ones win")
    part.add_argument("--connect", default="", metavar="ADDRESS", help="the broker's, or the run's folder")
    part.add_argument("--name", default="", help="unique among those of its role [default HOST-PID]")
    part.add_argument("--accelerators", default="", metavar="FIRST:END", help="of this machine's, from 0 [default all]")
    part.add_argument("--restarts", type=int, help="most in a row [default the section's max_restarts]")
    part.add_argument("--nodes", type=int, default=1, help="machines of the learner [default 1]")
    part.add_argument("--node", type=int, default=0, help="which of them this is, from 0 [default 0]")
    part.add_argument("--meeting", default="", metavar="HOST:PORT", help="on machine 0 [default what the broker says]")

    add(commands, "broker", actions.broker_command, "the broker of a run alone", config=True)

    worker = add(commands, "worker", actions.worker_command, "one generation worker", config=True)
    worker.add_argument("--connect", required=True, metavar="ADDRESS", help=BROKER)
    name = f"{socket.gethostname()}-{os.getpid()}"
    worker.add_argument("--name", default=name, help="unique among the run's workers [default HOST-PID]")

    scorer = add(commands, "scorer", actions.scorer_command, "one scorer, where reward.where = 'scorer'", config=True)
    scorer.add_argument("--connect", required=True, metavar="ADDRESS", help=BROKER)
    scorer.add_argument("--name", default=name, help="unique among the run's scorers [default HOST-PID]")

    agents = add(commands, "agents", actions.agents_command, "one agents process, where [agent] names one", config=True)
    agents.add_argument("--connect", required=True, metavar="ADDRESS", help=BROKER)
    agents.add_argument("--name", default=name, help="unique among the run's agents processes [default HOST-PID]")

    report = add(commands, "report", actions.report_command, "write the report of a run, one HTML file")
    report.add_argument("run", type=Path, help="a run folder, such as runs/quickstart")

    add_dashboard_options(
        add(commands, "dashboard", actions.dashboard_command, "look at a run or at several in a browser")
    )

    samples = add(
        commands, "samples", actions.samples_command, "what the policy said: samples of a run, with their rewards"
    )
    samples.add_argument("run", type=Path, help="a run folder, such as runs/quickstart")
    samples.add_argument("--step", type=int, help="of this step, as in metrics.jsonl [default the newest that is kept]")
    samples.add_argument("--worst", type=int, metavar="N", help="those with the lowest rewards [default all]")
    samples.add_argument("--best", type=int, metavar="N", help="those with the highest rewards [default all]")
    samples.add_argument("--group", type=int, metavar="G", help="of this group alone [default of all]")

    add_operation(commands, "status", actions.status_command, "the state of a run, of its broker if one answers")
    drain = add_operation(
        commands, "drain", actions.drain_command, "for maintenance: have all work handed back, give out none"
    )
    drain.add_argument("--end", action="store_true", help="go on handing out work [default off]")
    letters = add_operation(commands, "dead-letters", actions.dead_letters_command, "list samples that failed for good")
    letters.add_argument(
        "--requeue", metavar="GROUP|all", help="draw the prompt of a discarded group again [default none]"
    )

    simulate = add(
        commands,
        "simulate",
        actions.simulate_command,
        "plan a run on a virtual clock: schedules compared",
        overrides=True,
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
    tune = add(
        commands, "tune", actions.tune_command, "choose N' or the samples in flight, and say why", overrides=True
    )
    add_scenario(tune)
    tune.add_argument("--mean-staleness", type=float, help="largest of the mean over trained tokens [default none]")
    tune.add_argument("--trace", type=Path, help="lengths from this file of `april trace` [default the scenario's]")
    trace = add(
        commands, "trace", actions.trace_command, "write what a run did as a trace: for the simulator, or for Perfetto"
    )
    trace.add_argument(
        "what", nargs="?", choices=("lengths", "export", "send"), default="lengths",
        help="lengths: of responses, for the simulator; export: lanes, steps and lives of samples, for Perfetto; "
        "send: lives of samples, to a collector of OpenTelemetry",
    )  # fmt: skip
    trace.add_argument("run", type=Path, help="a run folder, such as runs/quickstart")
    trace.add_argument(
        "--out",
        required=True,
        help="JSONL file of lengths, Perfetto's file, or a collector's http://HOST:4318/v1/traces",
    )
    calibrate = add(
        commands, "calibrate", actions.calibrate_command, "measure an engine, and fit the simulator's cost model",
        overrides=True,
    )  # fmt: skip
    calibrate.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    calibrate.add_argument("--slots", type=int, default=64, help="sequences decoded together [default 64]")
    calibrate.add_argument("--out", type=Path, default=Path("cost.toml"), help="[cost] section [default cost.toml]")

    check = add(
        commands,
        "check",
        actions.check_command,
        "hold an engine or a schedule to what all of them keep",
        overrides=True,
    )
    check.add_argument("kind", choices=("engine", "schedule"), help="of part")
    check.add_argument("part", metavar="NAME", help="a shipped one's, or package.module:Class for your own")

    convert = add(
        commands, "convert", actions.convert_command, "another framework's script as a configuration of April's",
        overrides=True,
    )  # fmt: skip
    convert.add_argument("framework", metavar="FRAMEWORK", help="trl, verl, slime, openrlhf, or yours")
    convert.add_argument("script", type=Path, metavar="SCRIPT", help="shell script, Python script or YAML of a run")
    convert.add_argument("--out", type=Path, metavar="FILE", help="TOML file to write [default the terminal]")
    convert.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a variable that the script finds set"
    )

    keygen = add(commands, "keygen", actions.keygen_command, "make the keys of a run, or those of one more peer")
    keygen.add_argument("folder", type=Path, metavar="KEYS", help="folder of the keys and the allow-list")
    keygen.add_argument("--role", choices=ROLES, help="of one more peer [default: all keys]")
    keygen.add_argument("--name", help="of that peer and its key file, unique in the allow-list")

    weights = add(
        commands, "convert-weights", actions.convert_weights_command,
        "a checkpoint of a run as a Hugging Face folder; these to and from a back end's own checkpoints",
    )  # fmt: skip
    weights.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a run folder, a Hugging Face folder, or a back end's own checkpoint",
    )
    weights.add_argument(
        "--to",
        default="huggingface",
        metavar="FORM",
        help="that, or a back end's own by its name [default huggingface]",
    )
    weights.add_argument("--step", type=int, help="of a run's checkpoint [default the newest]")
    weights.add_argument(
        "--model", type=Path, metavar="FOLDER",
        help="of a back end's own checkpoint: the Hugging Face folder with its configuration and tokenizer",
    )  # fmt: skip
    weights.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new folder for the weights")

    policy = add(
        commands, "make-policy", actions.make_policy_command, "make the quickstart's policy (about a minute, cached)"
    )
    policy.add_argument("--out", type=Path, default=Path("cache/policy"), help="folder [default cache/policy]")
    policy.add_argument("--seed", type=int, default=0, help="of weights and demonstrations [default 0]")

    data = add(commands, "make-data", actions.make_data_command, "write the quickstart's prompts")
    data.add_argument("--out", type=Path, default=Path("cache/data"), help="folder [default cache/data]")
    data.add_argument("--train", type=int, default=4096, help="training prompts [default 4096]")
    data.add_argument("--heldout", type=int, default=512, help="held-out prompts [default 512]")
    data.add_argument("--seed", type=int, default=0, help="of the draw [default 0]")

    rows = add(commands, "verifiers", actions.verifiers_command, "write the rows of an environment of `verifiers`")
    rows.add_argument("name", help="as vf.load_environment takes it")
    rows.add_argument("--arguments", type=json.loads, default={}, metavar="JSON", help="what it is loaded with")
    rows.add_argument("--out", type=Path, help="folder [default cache/NAME]")
    rows.add_argument("--most", type=int, default=-1, help="rows of each file [default all]")
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


if __name__ == "__main__":
    sys.exit(main())
