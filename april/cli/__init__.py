"""The `april` command. Each file of this folder but `command.py` is a command."""

import errno
import importlib
import locale
import os
import pkgutil
import sys
import threading

from april.cli.command import COMMANDS, INTERRUPTED, Parser
from april.util.errors import ConfigError, refuse
from april.util.lifetime import REFUSED, endure_lost_readers, remember_interrupts
from april.util.registry import Registry, add_import_folders
from april.version import VERSION

DESCRIPTION = (
    "RL of language models with active partial rollouts. `april quickstart` trains a tiny policy on this machine; "
    "`april run CONFIG` trains yours."
)
OWN_COMMANDS = Registry("COMMAND", "command")
"""Registry of the user's own commands."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status; a ConfigError is printed as one sentence. `arguments`: words of the
    command line after `april`; None: those of this process."""
    if threading.current_thread() is threading.main_thread():
        remember_interrupts()
    if arguments is None:
        use_utf8()
        endure_lost_readers()
    keep_proxies_off_loopback()
    add_import_folders()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        parser = build_parser(words[0] if words and ":" in words[0] else "")
    except ConfigError as error:
        print(f"april: {error}", file=sys.stderr)
        return REFUSED
    options, overrides = parser.parse_known_args(arguments)
    values = vars(options)
    command = values.pop("command")
    if command.overrides:
        values["overrides"] = overrides
    elif overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        return command.function(**values)
    except ConfigError as error:
        print(f"april {command.name}: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        where = error.filename or values.get("run") or "a file"
        print(f"april {command.name}: {where} cannot be written ({error.strerror}); make room there", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def use_utf8() -> None:
    """Have this process and its children read and write text in UTF-8 whatever the locale; starts the process anew if
    it does not."""
    os.environ["PYTHONUTF8"] = "1"
    by_locale = not sys.flags.utf8_mode and locale.getencoding().lower() not in ("utf-8", "utf8")
    if by_locale and not sys.flags.ignore_environment:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keep_proxies_off_loopback() -> None:
    """Have HTTP clients of this process and its children reach this machine directly, whatever proxy is set."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in given.split(",") if host.strip()]
    for variable in ("no_proxy", "NO_PROXY"):  # clients read one or the other; * alone means every host
        os.environ[variable] = "*" if "*" in hosts else ",".join(dict.fromkeys([*hosts, *LOOPBACK]))


def build_parser(own: str = "") -> Parser:
    """The parser of all shipped commands and, if `own` is given, of the user's own command of that name: a function
    with `@command`, as `package.module:function`. Raises ConfigError."""
    for module in pkgutil.iter_modules(__path__):
        if module.name != "__main__":
            importlib.import_module(f"{__name__}.{module.name}")
    parser = Parser(prog="april", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"april {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in sorted(COMMANDS, key=lambda command: command.name):
        if command.function.__module__.startswith(f"{__name__}."):
            command.add_to(commands)
    if own:
        function = OWN_COMMANDS.find(own)
        added = [command for command in COMMANDS if command.function is function]
        if not added:
            refuse(OWN_COMMANDS.key, own, "is no command", "put @command of april.cli.command above the function")
        added[0].add_to(commands, own)
    return parser
