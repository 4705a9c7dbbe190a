"""Launcher of a machine's ranks: `python -m april.learner.launch --nproc-per-node R -m april.learner ...`.

As under torchrun, each rank is a process with RANK and WORLD_SIZE; when one fails, the others are killed, and all are
restarted up to --max-restarts times. Unlike torchrun, ranks are forks of one process that has imported their modules,
so that imports happen once; ranks of one machine meet in a file that only their user can open, so that no port is a way
in; ranks that refused to continue are not restarted. On several machines `multi_node.py` names the store.
"""

import argparse
import contextlib
import ctypes
import fcntl
import importlib
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from april.util.lifetime import REFUSED, SUPERVISED, die_with_parent, end_with_parent, exit_at_once
from april.util.registry import add_import_folders, python_command

STORE_FILE = "APRIL_RANKS_STORE"
"""Environment variable with the path of the file in which the ranks meet (`dist.FileStore`), in a folder of mode 0700;
each start of the ranks has a new one."""
FOLDER = "april-ranks-"
"""First part of the name of the folder in which ranks meet."""
SETTLED_S = 60.0
"""Age in seconds from which a folder in which ranks meet is removed if no process has locked it; a younger one may be
of a launcher that is about to lock it."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable with the number of times that the ranks have been restarted, named as by torchrun. With several
machines it is the number of the start (the joint launch of all machines' ranks), which the broker counts."""
OUT_OF_MEMORY = "; if nobody has sent it, memory ran out (dmesg says so): set a smaller learner.microbatch_tokens"
"""What is said of a rank that SIGKILL has ended."""
IMPORTED = ("april.learner.loop", "april.learner.source", "april.learner.trainer", "april.weights.publisher")
"""Names of modules imported before the ranks are forked; none may start a thread or use an accelerator."""


def main(arguments: list[str]) -> int:
    die_with_parent()
    add_import_folders()
    options = parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for CUDA must not initialise it
    for name in IMPORTED:
        importlib.import_module(name)
    folder = "" if options.store else make_folder()
    launcher, ranks = os.getpid(), dict[int, int]()
    for rank in range(options.ranks):
        if pid := os.fork():
            ranks[pid] = options.node * options.ranks + rank
        else:
            become_rank(rank, options, launcher, folder)
            return run(options.program)
    try:
        status = watch(ranks)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    started = int(os.environ.get(RESTARTS, 0))
    if status in (0, REFUSED) or started >= options.max_restarts:
        exit_at_once(status)
    os.environ[RESTARTS] = str(started + 1)
    os.execv(sys.executable, python_command("-m", "april.learner.launch", *arguments))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m april.learner.launch", allow_abbrev=False)
    parser.add_argument("--nproc-per-node", dest="ranks", type=int, default=1, help="ranks [default 1]")
    parser.add_argument("--max-restarts", type=int, default=0, help="of all ranks, when one has failed [default 0]")
    parser.add_argument("--nnodes", dest="nodes", type=int, default=1, help="machines [default 1]")
    parser.add_argument("--node", type=int, default=0, help="this machine's index, from 0 [default 0]")
    parser.add_argument("--store", default="", help="HOST:PORT of the machines' store")
    parser.add_argument("--start", type=int, default=0, help="number of this start of all machines' ranks")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, not a file")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="and its arguments")
    options = parser.parse_args(arguments)
    if not options.program:
        parser.error("name a program")
    options.program = ["-m"] * options.module + options.program
    return options


def make_folder() -> str:
    """Make the folder of mode 0700 in which the ranks of one machine meet. It is locked while this process or a fork of
    it lives; unlocked ones, of launchers that were killed, are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > SETTLED_S and lock(left) is not None:
                shutil.rmtree(left)
    folder = tempfile.mkdtemp(prefix=FOLDER)
    lock(Path(folder))
    return folder


def lock(folder: Path) -> int | None:
    """A descriptor that locks the folder while it is open; None if another process has it locked. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def become_rank(rank: int, options: argparse.Namespace, launcher: int, folder: str) -> None:
    end_with_parent()
    if os.getppid() != launcher:
        sys.exit("the learner's launcher has ended before this rank could start")
    os.setsid()
    first, world_size = options.node * options.ranks, options.nodes * options.ranks
    os.environ |= {"RANK": str(first + rank), "LOCAL_RANK": str(rank), "GROUP_RANK": str(options.node)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(options.ranks)}
    restarts = str(options.start) if options.store else os.environ.get(RESTARTS, "0")
    os.environ |= {SUPERVISED: str(launcher), RESTARTS: restarts}
    if folder:
        os.environ[STORE_FILE] = str(Path(folder) / "store")
    else:
        host, _, port = options.store.rpartition(":")
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    show_as_rank(options.program)


def run(program: list[str]) -> int:
    """Run a Python program (file, or -m and module, with arguments) in this process, as `python PROGRAM...` would."""
    if program[0] == "-m":
        sys.argv[:] = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = program
        sys.path.insert(0, str(Path(program[0]).parent))
        runpy.run_path(program[0], run_name="__main__")
    return 0


def watch(ranks: dict[int, int]) -> int:
    """Wait until all rank processes have ended; kill the rest when one fails. A signal that has ended one is said on
    stderr. `ranks`: rank by process id. Returns 0 if all succeeded, REFUSED if one refused to train, otherwise 1."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    statuses: set[int] = set()
    try:
        while ranks and statuses <= {0}:
            pid, ended = os.wait()
            status, rank = os.waitstatus_to_exitcode(ended), ranks.pop(pid, None)
            statuses.add(status)
            if status < 0 and rank is not None:
                hint = OUT_OF_MEMORY if -status == signal.SIGKILL else ""
                print(f"rank {rank} was ended by {signal.Signals(-status).name}{hint}", file=sys.stderr)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        while ranks:
            ranks.pop(os.wait()[0], None)
    return REFUSED if REFUSED in statuses else int(statuses != {0})


def show_as_rank(program: list[str]) -> None:
    """Make ps and /proc show the command `python -u PROGRAM...` for this rank, a fork of the launcher, instead of the
    launcher's command line. `program`: the rank's program with its arguments. Linux only; does nothing elsewhere."""
    if sys.platform != "linux":
        return
    shown = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    start = shown.index(os.fsencode(program[0]), 3)
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"\0".join([shown[0], b"-u", *shown[start:]])[: end - begin]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
