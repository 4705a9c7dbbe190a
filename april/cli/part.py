"""`april part`: one part of a run, supervised on this machine."""

import sys
from pathlib import Path
from typing import Literal

from april.cli.command import CONFIG, command, option


@command(
    option("role", choices=("broker", "learner", "worker", "scorer", "agents"), help="Which part to start."),
    CONFIG,
    option(
        "--connect",
        default="",
        metavar="ADDRESS",
        help="Broker's address, as tcp://HOST:PORT, or the run's folder; every part but the broker needs it.",
    ),
    option("--name", default="", help="Name of the part, unique among those of its role [default: HOST-PID]."),
    option(
        "--accelerators",
        default="",
        metavar="FIRST:END",
        help="This machine's accelerators to use, counted from 0, END excluded [default: all].",
    ),
    option(
        "--restarts",
        type=int,
        help="Most restarts in a row without useful work; 0 leaves restarts to the platform [default: "
        "max_restarts of the part's section].",
    ),
    option("--nodes", type=int, default=1, help="Machines that the learner is spread over [default: 1]."),
    option(
        "--node", type=int, default=0, help="Index of this machine among the learner's machines, from 0 [default: 0]."
    ),
    option(
        "--meeting",
        default="",
        metavar="HOST:PORT",
        help="Address on machine 0 for the rendezvous of the learner's ranks [default: announced by the broker].",
    ),
    overrides=True,
)
def part(
    role: str,
    config: list[Path],
    connect: str,
    name: str,
    accelerators: str,
    restarts: int | None,
    nodes: int,
    node: int,
    meeting: str,
    overrides: list[str],
) -> int:
    """Start one part of a run on this machine, and restart it when it dies."""
    from april.config import load
    from april.config.hub import Fetcher
    from april.launch.part import LearnerNode, supervise_part

    learner_node = LearnerNode(nodes, node, meeting) if nodes > 1 else None
    needs_weights = role in ("learner", "worker")
    prompts_of_role: dict[str, Literal["rows", "conversations"]] = {"broker": "rows", "learner": "conversations"}
    fetcher = Fetcher("weights" if needs_weights else "tokenizer", prompts_of_role.get(role))
    loaded = load(config, overrides, inputs=(), fetch=fetcher)
    for fact in fetcher.facts:
        print(f"april part: {fact}", file=sys.stderr, flush=True)
    words = [*map(str, config), *overrides, *loaded.pins]
    return supervise_part(role, loaded, words, connect, name, restarts, learner_node, accelerators)
