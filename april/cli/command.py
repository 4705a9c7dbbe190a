"""Defines commands of `april` (functions with options, whose docstrings are their help) and helpers that several
commands share.

Neither this module nor the top of a command's file imports anything heavy: every start of a part reads them all.
"""

import argparse
import inspect
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from april.util.errors import refuse
from april.util.registry import add_import_folders, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from april.config import Config

INTERRUPTED = 130
"""Exit status of a command that the user interrupted, and of a run that the user stopped."""
PIPED_COLUMNS = 10_000
"""Width of output to a pipe or file (characters), so large that no line is cut."""


@dataclass(frozen=True)
class Option:
    names: tuple[str, ...]
    settings: dict[str, Any]


def option(*names: str, **settings: Any) -> Option:
    """An option or a positional argument, with the parameters of `argparse.ArgumentParser.add_argument`."""
    return Option(names, settings)


class Parser(argparse.ArgumentParser):
    """A parser whose help can list the keys of the configuration, or of one section that is named after `--help`, with
    those of the parts that the configuration names."""

    lists_keys = False
    given: Sequence[str] = ()
    """The words of the command line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        if self.lists_keys:
            from april.config import OVERRIDES, describe_keys
            from april.config.loading import model_of, read_tree
            from april.util.errors import ConfigError

            files = [Path(word) for word in self.given if word.endswith(".toml")]
            try:
                model = model_of(read_tree(files))
            except ConfigError:
                model = model_of({})
            if section := next((word for word in self.given if word in model.model_fields), ""):
                return describe_keys(model, section).lstrip() + "\n"
            if unknown := self.word_behind_help():
                known = ", ".join(model.model_fields)
                self.exit(
                    2, f"{self.prog}: --help {unknown} names no section of the configuration; use one of {known}\n"
                )
            self.epilog = OVERRIDES + describe_keys(model)
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of its action's choices. The error for an unknown command suggests the most
        similar one."""
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            return super()._check_value(action, value)
        hint = did_you_mean(value, action.choices)
        self.error(f"{value!r} is no command; {hint}`april --help` lists all, and your own is MODULE:FUNCTION")

    def word_behind_help(self) -> str:
        """The word that follows `--help`; empty if that is another option, a configuration, or nothing."""
        pairs = zip(self.given, self.given[1:], strict=False)
        words = (word for option, word in pairs if option in ("-h", "--help"))
        return next((word for word in words if not word.startswith("-") and not word.endswith(".toml")), "")


@dataclass(frozen=True)
class Command:
    function: Callable[..., int]
    """Function that carries out the command: takes each option as a keyword argument, and `overrides` if the command
    accepts them; returns the exit status."""
    options: Sequence[Option]
    overrides: bool
    """Whether the command accepts `--section.key value` for any configuration key."""
    lists_keys: bool
    """Whether the command's help lists all configuration keys."""

    @property
    def name(self) -> str:
        return self.function.__name__.replace("_", "-")

    def add_to(self, commands: "argparse._SubParsersAction[Parser]", name: str = "") -> None:
        """Add the command to a parser; `name`: subcommand name in place of the command's own."""
        text = inspect.getdoc(self.function) or ""
        parser = commands.add_parser(
            name or self.name,
            help=text.partition("\n\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.lists_keys = self.lists_keys
        parser.set_defaults(command=self)
        for option in self.options:
            parser.add_argument(*option.names, **option.settings)


COMMANDS: list[Command] = []
"""All commands whose files have been imported."""

Function = TypeVar("Function", bound=Callable[..., int])


def command(*options: Option, overrides: bool = False, lists_keys: bool = False) -> Callable[[Function], Function]:
    """Make a function a command of `april` whose name is that of the function, with - for _. `overrides`: whether the
    command accepts `--section.key value`; `lists_keys`: whether its help lists these keys.

    @command(option("--out", type=Path, help="Folder."), option("--seed", type=int, default=0, help="Seed."))
    def make_data(out: Path, seed: int) -> int:
        '''Write the quickstart's prompts.'''
    """

    def register(function: Function) -> Function:
        COMMANDS.append(Command(function, options, overrides or lists_keys, lists_keys))
        return function

    return register


# --- options and helpers that several commands share ---------------------------------------------------------------

CONFIG = option(
    "config", type=Path, nargs="+", help="TOML file of the run; of several, keys in later files win over earlier ones."
)
RUN = option("run", type=Path, help="Run folder, such as runs/quickstart.")
MONITOR_KEYS = option(
    "--security.keys",
    dest="keys",
    type=Path,
    metavar="KEYS",
    help="Folder or file with a monitor's key, where the run uses keys [default: those of the run].",
)
CONNECT = option(
    "--connect", required=True, metavar="ADDRESS", help="Broker's address, as tcp://HOST:PORT, or the run's folder."
)
NAME = option(
    "--name",
    default=f"{socket.gethostname()}-{os.getpid()}",
    help="Name of this process, unique among those of its role [default: HOST-PID].",
)


def load_config(paths: Sequence[Path], overrides: list[str], **settings: Any) -> "Config":
    """Load a configuration from the TOML files `paths` and the command line's `overrides`, and add the folders of
    `run.parts` to Python's import path. `settings`: further parameters of `april.config.load`."""
    from april.config import load

    config = load(paths, overrides, **settings)
    add_import_folders(*config.run.parts)
    return config


def joining(files: list[Path], connect: str, overrides: list[str]) -> tuple["Config", str]:
    """The configuration and the broker's address for a process that joins a run. `connect`: that address, or the run's
    folder, in which the broker writes it. From this call on this process ends with its parent. Raises ConfigError, and
    SystemExit if no broker writes its address into the folder in time."""
    from april.config import check_address, with_run_keys
    from april.util.lifetime import die_with_parent

    die_with_parent()
    config = load_config(files, overrides, inputs=["model"], own_parts=["worker.engine", "weights.transport"])
    try:
        return with_run_keys(config, check_address(connect)), connect
    except TimeoutError as error:
        raise SystemExit(f"april: {error}") from None


def wide_console() -> "Console":
    """Console that cuts lines at the width of a terminal, but not in output to a pipe or file."""
    from april.observe.report.live import plain_console

    return plain_console() if sys.stdout.isatty() else plain_console(PIPED_COLUMNS)


def check_writable(out: Path) -> None:
    """Refuse an output file that cannot be written, before the work whose result it gets; leaves no file behind. Raises
    ConfigError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        existed = out.exists()
        out.open("a").close()
        if not existed:
            out.unlink()
    except OSError as error:
        refuse("--out", out, f"cannot be written ({error.strerror})", "give a file")
