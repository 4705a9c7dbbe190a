"""`april status`, `april drain` and `april dead-letters`: questions and orders to the broker of a run."""

import sys
from pathlib import Path

from april.cli.command import MONITOR_KEYS, command, option, wide_console
from april.util.errors import refuse

ADDRESS = (
    option("run", type=Path, nargs="?", help="Run folder, such as runs/quickstart."),
    option(
        "--connect",
        metavar="ADDRESS",
        help="Broker's address, as tcp://HOST:PORT [default: the one in the run folder].",
    ),
    MONITOR_KEYS,
)


@command(*ADDRESS)
def status(run: Path | None, connect: str | None, keys: Path | None) -> int:
    """Print the state of a run: its broker's, if one answers, and its folder's."""
    from april.observe.operate import RunAddress
    from april.observe.report.live import plain_console
    from april.observe.report.operations import print_status, render_live
    from april.observe.report.run_folder import read_run
    from april.wire.sockets.broker import BrokerRefused, BrokerUnreachable

    if run is not None:
        read_run(run)
    try:
        plain_console().print(render_live(RunAddress(run, connect, keys).status()))
    except (BrokerRefused, BrokerUnreachable) as error:
        if run is None:
            print(f"april status: {error}", file=sys.stderr)
            return 1
        print(f"no broker answers ({error}); the run folder says:")
    if run:
        print_status(run)
    return 0


@command(*ADDRESS, option("--end", action="store_true", help="End the drain: hand out work again."))
def drain(run: Path | None, connect: str | None, keys: Path | None, end: bool) -> int:
    """Drain a run for maintenance: workers hand back all work, and get no more until --end."""
    from april import wire
    from april.observe.operate import RunAddress
    from april.wire.sockets.broker import BrokerRefused, BrokerUnreachable

    try:
        RunAddress(run, connect, keys).ask(wire.Drain(not end))
    except (BrokerRefused, BrokerUnreachable) as error:
        print(f"april drain: {error}", file=sys.stderr)
        return 1
    print("work is handed out again" if end else "draining; `april status` says when nothing is leased")
    return 0


@command(
    *ADDRESS,
    option(
        "--requeue",
        metavar="GROUP|all",
        help="Generate the prompt of a discarded group again, by the group's number, or of all [default: only list].",
    ),
)
def dead_letters(run: Path | None, connect: str | None, keys: Path | None, requeue: str | None) -> int:
    """List the samples that failed for good, or queue their prompts again."""
    from april.broker.journal.files import JournalError
    from april.observe.operate import RunAddress
    from april.observe.report.operations import render_dead_letters
    from april.wire.sockets.broker import BrokerRefused, BrokerUnreachable

    if requeue and requeue != "all" and not requeue.isdecimal():
        refuse("--requeue", requeue, "is no group", "give the number of one, or all")
    address = RunAddress(run, connect, keys)
    try:
        if requeue:
            groups, live = address.requeue([] if requeue == "all" else [int(requeue)])
            print(f"re-queued: {', '.join(map(str, groups)) or 'none that was not already'}")
            if not live:
                print("no broker runs; `april run CONFIG --resume` draws them")
            return 0
        listed, live = address.dead_letters()
    except (BrokerRefused, BrokerUnreachable, JournalError) as error:
        print(f"april dead-letters: {error}", file=sys.stderr)
        return 1
    wide_console().print(render_dead_letters(listed))
    if not live:
        print("no broker answers; this is what the last one left in the run folder")
    return 0
