"""Starts April's programs as forks of a process that has already imported torch, other packages and April.

`Popen` is subprocess.Popen for commands such as `python -m april.cli run ...`: the program runs in a fork of a process
that has only done those imports. It is a child of the caller, with its own process id, command line, environment,
output and session. It can be killed, stopped and waited for like any other, and starts its own programs in the same
way, from a fork made before it did anything. Other commands are started as usual.
"""

import array
import ctypes
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

PREPARED = (
    "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.checkpoint.filesystem",
    "transformers.conversion_mapping", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3", "transformers.tokenization_utils_tokenizers", "aiohttp",
    "jinja2.sandbox", "msgspec", "orjson",
    "prometheus_client", "pydantic.fields", "pydantic.json_schema", "pytest", "rich.live", "zmq.asyncio",
)  # fmt: skip
"""Modules of other packages to import in advance."""
PARTS = (
    "april.broker.server", "april.cli", "april.launch.preflight", "april.launch.supervisor", "april.learner.loop",
    "april.learner.source", "april.learner.trainer", "april.observe.dashboard.report", "april.simulate.tune",
    "april.weights.publisher", "april.workers.engines.embedded.engine", "april.workers.process",
)  # fmt: skip
"""April's own, with all that they import: what the parts of a run are made of."""
TESTS = Path(__file__).parents[1]
PROGRAMS = ("april.cli", "april.learner", "tests.")
"""Prefixes of the modules (`python -m ...`) that run in forks."""
MARK = "APRIL_TEST_RUN"
"""Environment variable of all processes of a test. A fork, whose environment is not visible from outside, has it in its
command line."""
ROOM = 16384
"""Longest command line that a fork can show as its own (bytes)."""
PR_SET_CHILD_SUBREAPER = 36
ENDS = {signal.SIGINT, signal.SIGTERM}
"""Signals blocked in the process that is forked. A fork that gets one before it runs its program handles it then."""

cold_start = subprocess.Popen._execute_child
preparer: socket.socket | None = None
"""Connection to the process that is forked for each program; None before that process is started."""
start_lock = threading.Lock()


class Popen(subprocess.Popen):
    def _execute_child(self, *given):
        command, _, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *rest = given
        pipes, new_session = rest[:6], rest[11]
        if shell or preexec_fn or pass_fds or not is_program(command):
            return cold_start(self, *given)
        program = (list(command), os.fspath(cwd or os.getcwd()), dict(env or os.environ), os.nice(0), new_session)
        self.pid = start(program, [end if end >= 0 else own for own, end in enumerate(pipes[1::2])])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def is_program(command: list[str]) -> bool:
    interpreter, first, second, *_ = [word for word in command if word not in ("-u", "-P")] + [""] * 2
    known = second.startswith(PROGRAMS) if first == "-m" else TESTS in Path(first).parents
    return known and interpreter == sys.executable


def start(program: tuple, files: list[int]) -> int:
    """Start a program as a child of this process; returns its process id."""
    with start_lock:
        adopt(True)
        connection = preparer or prepare()
        data = pickle.dumps(program)
        connection.sendmsg([len(data).to_bytes(8)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
        connection.sendall(data)
        pid = int.from_bytes(connection.recv(8))
        adopt(False)
    assert pid, "the process that programs are forked from has ended"
    return pid


def adopt(on: bool) -> None:
    """Set whether orphaned descendants become children of this process (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on))


def prepare() -> socket.socket:
    global preparer
    preparer, far = socket.socketpair()
    os.set_inheritable(far.fileno(), True)
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    command = [sys.executable, "-m", __name__, str(far.fileno()), " " * ROOM]
    subprocess.Popen(command, env=os.environ | one_thread, pass_fds=[far.fileno()], cwd=TESTS.parent)
    far.close()
    return preparer


# --- in the process that is forked --------------------------------------------------------------------------


def main() -> None:
    global preparer
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in (*PREPARED, *PARTS):
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")  # compiles hundreds of patterns, and keeps them
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing from the forks"
    gc.freeze()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    while True:
        program, files = serve(connection)
        connection.close()
        *_, new_session = program
        if new_session:
            os.setsid()
        preparer, connection = socket.socketpair()
        if os.fork():
            connection.close()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
            return run(*program, files)
        preparer.close()
        for file in files:
            os.close(file)


def serve(connection: socket.socket) -> tuple[tuple, list[int]]:
    """Fork for each request; returns only in a fork, once it has become a child of the requesting process, with
    (program, files) to run."""
    while True:
        head, files, *_ = socket.recv_fds(connection, 8, 3)
        if not head:
            os._exit(0)
        program = pickle.loads(connection.recv(int.from_bytes(head), socket.MSG_WAITALL))
        near, far = os.pipe()
        if middle := os.fork():
            os.close(far)
            os.waitpid(middle, 0)
            connection.sendall(os.read(near, 8))
            for file in (near, *files):
                os.close(file)
            continue
        middle = os.getpid()
        if child := os.fork():
            os.write(far, child.to_bytes(8))
            os._exit(0)
        os.close(near)
        os.close(far)
        while os.getppid() == middle:
            time.sleep(0.001)
        return program, files


def run(command: list[str], folder: str, environment: dict[str, str], nice: int, new_session: bool, files: list[int]):
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.nice(nice - os.nice(0))
    outer = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(environment)
    show_command([*command, *(f"{name}={value}" for name, value in environment.items() if name == MARK)])
    subprocess.Popen._execute_child = Popen._execute_child
    restore_own_state(environment)
    words = command[1:]
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        words.pop(0)
    if safe := words[0] == "-P":
        words.pop(0)
    inner = environment.get("PYTHONPATH", "").split(os.pathsep)
    path = [entry for entry in inner if entry] + [entry for entry in sys.path[1:] if entry not in outer]
    if words[0] == "-m":
        sys.path[:] = path if safe else [folder, *path]
        sys.argv[:] = words[1:]
        sys.modules.pop(words[1], None)  # it runs as __main__
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:] = [str(Path(words[0]).parent), *path]
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def restore_own_state(environment: dict[str, str]) -> None:
    import numpy as np
    import torch

    np.random.seed()
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def show_command(words: list[str]) -> None:
    """Set this process's command line as shown in /proc and by ps."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"\0".join(map(os.fsencode, words))
    assert len(text) < end - begin, f"the command is too long: {words}"
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
