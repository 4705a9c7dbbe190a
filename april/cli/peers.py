"""`april worker`, `april scorer` and `april agents`: processes that take work from a broker."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from april.cli.command import CONFIG, command, load_config, option

if TYPE_CHECKING:
    from april.config import Config

CONNECT = option(
    "--connect", required=True, metavar="ADDRESS", help="Broker's address, as tcp://HOST:PORT, or the run's folder."
)
NAME = option(
    "--name",
    default=f"{socket.gethostname()}-{os.getpid()}",
    help="Name of this process, unique among those of its role [default: HOST-PID].",
)


@command(CONFIG, CONNECT, NAME, lists_keys=True)
def worker(config: list[Path], connect: str, name: str, overrides: list[str]) -> int:
    """Run one generation worker, without restarts."""
    from april.workers.process import run_worker

    run_worker(*joining(config, connect, overrides), name)


@command(CONFIG, CONNECT, NAME, lists_keys=True)
def scorer(config: list[Path], connect: str, name: str, overrides: list[str]) -> int:
    """Run one scorer, without restarts; for reward.where = 'scorer'."""
    from april.workers.process import run_scorer

    run_scorer(*joining(config, connect, overrides), name)


@command(CONFIG, CONNECT, NAME, lists_keys=True)
def agents(config: list[Path], connect: str, name: str, overrides: list[str]) -> int:
    """Run one agents process, without restarts; for a configuration with an [agent]."""
    from april.agents.process import run_agents

    run_agents(*joining(config, connect, overrides), name)


def joining(files: list[Path], connect: str, overrides: list[str]) -> tuple["Config", str]:
    """The configuration and the broker's address for a process that joins a run; this process ends with its parent from
    then on. Raises ConfigError, and SystemExit where a run's folder has no broker."""
    from april.config import check_address, with_run_keys
    from april.util.lifetime import die_with_parent

    die_with_parent()
    config = load_config(files, overrides, inputs=["model"], own_parts=["worker.engine", "weights.transport"])
    try:
        return with_run_keys(config, check_address(connect)), connect
    except TimeoutError as error:
        raise SystemExit(f"april: {error}") from None
