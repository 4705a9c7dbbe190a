"""What programs under test try, and what each attempt must get: no verdict but its own, and nothing of the host's."""

import ctypes
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from april.util.errors import ConfigError
from april.util.files import remove_folder
from april.workers.rewards import sandbox
from april.workers.rewards.code import code
from april.workers.rewards.messages import Item, RewardRules
from april.workers.rewards.sandbox_runner import all_can_read

pytestmark = pytest.mark.xdist_group("programs")
LANDLOCK = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)) > 0
ASSERTIONS = "assert secret(20) == 6765\nassert secret(1) == 1\nassert [secret(n) for n in range(3)] == [0, 1, 1]"
CALLS = json.dumps({"fn_name": "secret", "inputs": [[20], [1]], "outputs": [6765, 1]})
STREAMS = json.dumps({"inputs": ["20\n", "1\n"], "outputs": ["6765\n", "1\n"]})


def reward(program, label, **rules):
    response = f"```python\n{program}\n```"
    [score] = code([Item(0, "code", response, label, "stop")], RewardRules(code_test_s=10.0, **rules))
    return score.reward


def test_a_program_of_root_runs_under_the_private_umask_of_a_run(monkeypatch):
    """Where the program may read the interpreter, it keeps no right of root's, so its own files must be its own."""
    pythons = [path for path in map(os.path.realpath, (sys.executable, "/usr/bin/python3")) if all_can_read(path)]
    if os.getuid() or not pythons or not os.path.exists(pythons[0]):
        pytest.skip("needs root, and an interpreter that every user can read")
    monkeypatch.setattr(sys, "executable", pythons[0])
    before = os.umask(0o077)
    try:
        assert reward("def secret(n): return [0, 1, 1][n] if n < 3 else 6765", ASSERTIONS) == 1.0
    finally:
        os.umask(before)


# --- the verdict --------------------------------------------------------------------------------------------

AGAINST_ASSERTIONS = {
    "reads its own file for a mark": "import re, os\nprint(open('program.py').read()); os._exit(0)",
    "exits well": "import sys\nsys.exit(0)",
    "exits well at once": "import os\nos._exit(0)",
    "is silent": "pass",
    "is equal to everything": "class E:\n    def __eq__(self, other): return True\ndef secret(n): return E()",
    "is an integer that is equal to everything":
        "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def secret(n): return E(5)",
    "spells an integer as it likes": "class E(int):\n    def __str__(self): return '6765'\ndef secret(n): return E(5)",
    "is a list that is equal to everything":
        "class E(list):\n    def __eq__(self, other): return True\ndef secret(n): return E()",
    "answers for itself": (
        "import os\n"
        "for number in range(3, 64):\n"
        "    try: os.write(number, b'[\"is\", {\"int\": \"6765\"}, []]\\n' * 9)\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    ),
    "answers with what is no JSON": (
        "import os\nfor number in range(3, 64):\n    try: os.write(number, b'[' * 60000 + b'\\n')\n"
        "    except OSError: pass\nimport time; time.sleep(0.5)"
    ),
    "raises what the test would raise": "def secret(n): raise AssertionError",
    "ends in the call": "import os\ndef secret(n): os._exit(0)",
    "exits in the call": "def secret(n): raise SystemExit(0)",
    "changes what is compared": "import builtins\nbuiltins.range = lambda n: []\ndef secret(n): return 6765",
    "shadows the built-ins": "def all(x): return True\ndef len(x): return 0\ndef secret(n): return len(())",
    "looks for the expected value among its frames": (
        "import sys, gc\n"
        "def secret(n):\n"
        "    found = [o for o in gc.get_objects() if isinstance(o, str) and '6765' in o]\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        found += [v for v in frame.f_locals.values() if v == 6765]\n"
        "        frame = frame.f_back\n"
        "    return 6765 if found and n == 20 else 0 if n == 0 else 1"
    ),
}  # fmt: skip
AGAINST_CALLS = {
    "writes a result of its own behind the mark":
        "import atexit\natexit.register(lambda: print('7'))\ndef secret(n): return n",
    "writes deep JSON": "def secret(n):\n    import atexit; atexit.register(lambda: print('[' * 100000)); return n",
    "writes a long integer": "import sys\nsys.set_int_max_str_digits(0)\ndef secret(n): return 10 ** 5000",
    "is not a number": "def secret(n): return float('nan')",
    "returns what is no JSON": "def secret(n): return object()",
    "is true": "def secret(n): return True",
}  # fmt: skip
AGAINST_STREAMS = {
    "prints both answers": "print(6765); print(1)",
    "prints bytes that are no text": "import sys; sys.stdout.buffer.write(bytes(range(256)))",
    "prints and fails": "print(6765 if input() == '20' else 1); raise SystemExit(3)",
}
TRIES = [
    *((name, text, ASSERTIONS) for name, text in AGAINST_ASSERTIONS.items()),
    *((name, text, CALLS) for name, text in AGAINST_CALLS.items()),
    *((name, text, STREAMS) for name, text in AGAINST_STREAMS.items()),
]


@pytest.mark.parametrize(("name", "text", "label"), TRIES, ids=[name for name, *_ in TRIES])
def test_no_attack_turns_a_wrong_program_into_a_right_one(name, text, label):
    assert reward(text, label) == 0.0


FIBONACCI = "def secret(n):\n    a, b = 0, 1\n    for _ in range(n): a, b = b, a + b\n    return a"


def test_a_right_program_passes_all_three_kinds_of_tests():
    assert reward(FIBONACCI, ASSERTIONS) == reward(FIBONACCI, CALLS) == 1.0
    assert reward(f"{FIBONACCI}\nprint(secret(int(input())))", STREAMS) == 1.0


# --- the host -----------------------------------------------------------------------------------------------

HOST = {
    "passwords": "open('/etc/shadow').read()",
    "users": "open('/etc/passwd').read()",
    "the host's name": "open('/etc/hostname').read()",
    "a key": "open(KEY).read()",
    "a key by its descriptor's path": "os.open(KEY, os.O_RDONLY)",
    "a key through a link": "os.symlink(KEY, 'link'), open('link').read()",
    "a key through a hard link": "os.link(KEY, 'hard'), open('hard').read()",
    "a key through a child": "subprocess.run(['/bin/cat', KEY], check=True)",
    "a key through root": "open('/proc/1/root' + KEY).read()",
    "the folder of keys": "os.listdir(os.path.dirname(KEY))",
    "the project": "open(PROJECT).read()",
    "the home of root": "os.listdir('/root')",
    "the root": "os.listdir('/')",
    "other programs": "os.listdir('/tmp')",
    "what stays in tmp": "open('/tmp/april-left-over', 'w')",
    "what stays in shared memory": "open('/dev/shm/april-left-over', 'w')",
    "what stays in var": "open('/var/tmp/april-left-over', 'w')",
    "a key's end": "os.remove(KEY)",
    "a key cut": "os.truncate(KEY, 0)",
    "the interpreter": "open(os.__file__, 'a')",
    "a device": "os.open('/dev/mem', os.O_RDONLY)",
    "the kernel's log": "os.open('/dev/kmsg', os.O_RDONLY)",
    "a connection": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "a server": "socket.socket().bind(('0.0.0.0', 8080))",
    "a mount": "subprocess.run(['/bin/mount', '-t', 'tmpfs', 'none', '/tmp'], check=True)",
}
FILTERED = {
    "a socket that anybody may connect to": "socket.socket(socket.AF_UNIX).connect(DOOR)",
    "a datagram to such a socket": "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).connect(DOOR)",
    "an abstract socket": "socket.socket(socket.AF_UNIX).bind('\\0april')",
    "a namespace of its own": "succeeds(LIBC.unshare(0x10000000))",
    "a mount namespace of its own": "succeeds(LIBC.unshare(0x00020000))",
    "a child in a namespace of its own": "succeeds(LIBC.syscall(NR_CLONE, 0x10000011, None, None, None, None))",
    "memory that no limit sees": "os.memfd_create('m')",
    "another's memory": "succeeds(LIBC.ptrace(16, os.getppid(), 0, 0))",
    "the kernel's keys": "succeeds(LIBC.syscall(NR_KEYCTL, 0, -3, 1))",
}
ATTEMPT = """
import ctypes, os, platform, socket, subprocess
KEY, PROJECT, PORT, DOOR = {given!r}
LIBC = ctypes.CDLL(None)
NR_CLONE, NR_KEYCTL = (220, 219) if platform.machine() == 'aarch64' else (56, 250)
def succeeds(result):
    if result == 0 and os.getppid() == 0: os._exit(0)
    if result < 0: raise PermissionError
for name, text in {attempts!r}.items():
    try:
        exec(text)
    except BaseException as error:
        print(name, type(error).__name__, sep=': ')
    else:
        print(name, 'GOT IT', sep=': ')
"""


def got(tmp_path, attempts):
    """Results of the attempts that a program made."""
    key, door = tmp_path / "broker.key", tmp_path / "door"
    key.write_text("secret")
    key.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as open_to_all:
        open_to_all.bind(str(door))
        open_to_all.listen()
        door.chmod(0o777)
        given = (str(key), str(Path(sandbox.__file__).resolve()), server.getsockname()[1], str(door))
        outcome = sandbox.run(ATTEMPT.format(given=given, attempts=attempts), b"", sandbox.SandboxLimits(wall_s=30.0))
    lines = outcome.output.decode().splitlines()
    assert [line.partition(":")[0] for line in lines] == list(attempts), outcome.errors.decode()
    assert key.read_text() == "secret"
    return [line for line in lines if "GOT IT" in line]


def test_no_program_opens_a_socket_a_namespace_or_unlimited_memory(tmp_path):
    assert got(tmp_path, FILTERED) == []


needs_landlock = pytest.mark.skipif(not LANDLOCK, reason="needs Landlock in the kernel")


@needs_landlock
def test_no_program_gets_anything_of_the_host(tmp_path):
    assert got(tmp_path, HOST) == []


@needs_landlock
def test_a_program_cannot_count_its_runs():
    count = (
        "import glob, os, tempfile\n"
        "runs = 1\n"
        "for folder in ('.', '/tmp', '/dev/shm', '/var/tmp', tempfile.gettempdir()):\n"
        "    try:\n"
        "        runs = max(runs, len(glob.glob(f'{folder}/april-run-*')) + 1)\n"
        "        open(f'{folder}/april-run-{runs}', 'w').close()\n"
        "    except OSError: pass\n"
        "print(6765 if runs == 1 else 1)"
    )
    assert reward(count, STREAMS) == 0.0


# --- limits -------------------------------------------------------------------------------------------------

TOGETHER = {
    "three children of 600 MB": (
        "import os, time\nfor _ in range(3):\n"
        "    if os.fork() == 0:\n        x = bytearray(600 << 20); time.sleep(60)\n"
        "time.sleep(60)",
        "memory",
    ),
    "twenty files of 15 MB": (
        "import time\nfor n in range(20):\n    open(f'f{n}', 'wb').write(bytes(15 << 20))\ntime.sleep(60)", "output"
    ),
    "twenty such files that have no name": (
        "import os, time\nfiles = []\nfor n in range(20):\n    files.append(open('f', 'wb', buffering=0))\n"
        "    files[-1].write(bytes(15 << 20)); os.remove('f')\ntime.sleep(60)",
        "output",
    ),
}  # fmt: skip


def test_a_control_group_limits_the_memory_of_all_processes(monkeypatch):
    monkeypatch.setattr(sandbox.UsageWatch, "exceeded", lambda watch: "")
    text = (  # the first has its memory until the second is over
        "import os\n(full, says), (over, ends) = os.pipe(), os.pipe()\n"
        "if os.fork() == 0:\n    x = bytearray(700 << 20)\n"
        "    os.write(says, b'.'); os.close(ends); os.read(over, 1); os._exit(0)\n"
        "os.read(full, 1)\n"
        "if os.fork() == 0:\n    x = bytearray(700 << 20); os._exit(0)\n"
        "os.wait(); os.close(ends); os.wait()"
    )
    parent, _ = sandbox.find_parent_group()
    assert sandbox.run(text, b"", sandbox.SandboxLimits(wall_s=60.0)).exceeded == ("memory" if parent else "")
    assert parent is None or not list(parent.glob(f"april-{os.getpid()}-*")), "a group is left"


@pytest.mark.parametrize("name", TOGETHER)
def test_limits_hold_for_all_processes_of_a_program_together(name, monkeypatch):
    """Also on hosts where no control group can be created."""
    monkeypatch.setattr(sandbox, "find_parent_group", lambda: (None, ""))
    text, limit = TOGETHER[name]
    assert sandbox.run(text, b"", sandbox.SandboxLimits(wall_s=30.0)).exceeded == limit


FILES = {
    "folders within folders": (
        "import os\nfor n in range(1100):\n    os.mkdir('d'); os.chdir('d')\nprint('well')", ""
    ),
    "a path longer than the system takes": (
        "import os\nfor n in range(40):\n    os.mkdir('d' * 200); os.chdir('d' * 200)\n"
        "import time; time.sleep(60)",
        "wall clock",
    ),
    "folders that nobody may enter": (
        "import os\nfor n in range(3):\n    os.mkdir(f'd{n}'); os.mkdir(f'd{n}/e'); open(f'd{n}/e/f', 'w').close()\n"
        "for n in range(3):\n    os.chmod(f'd{n}/e', 0); os.chmod(f'd{n}', 0)\nos.chmod('.', 0)\nprint('well')",
        "",
    ),
    "names that are no text": (
        "import os\nfor n in range(1, 256):\n    if n != 47: os.mkdir(bytes([n, 255, 10]))\n"
        "os.symlink('/', b'\\xff'); os.mkfifo(b'\\xfe')\nprint('well')",
        "",
    ),
    "a flood of folders": (
        "import os\nfor n in range(10 ** 9):\n    try: os.mkdir(str(n))\n    except OSError: pass", "wall clock"
    ),
    "a flood of links": (
        "import os\nopen('f', 'w').close()\nfor n in range(10 ** 6):\n    os.link('f', f'l{n}')", "output"
    ),
    "a flood from many processes": (
        "import os\nfor n in range(4):\n    if os.fork() == 0:\n        for m in range(10 ** 5):\n"
        "            os.makedirs(f'{n}/{m}/{m}')\n        os._exit(0)\nfor n in range(4): os.wait()\n"
        "raise OSError(28, '')",
        "output",
    ),
}  # fmt: skip
"""Files and folders that a program leaves, and the limit that it has exceeded where the kernel holds them."""
WATCHED = {"a flood of folders": "output", "a path longer than the system takes": "output"}
"""The limit of those whose folder is only watched, if it is another."""


@pytest.fixture(params=["a file system of its own", "a folder that is watched"])
def watched(request, monkeypatch):
    if watched := request.param == "a folder that is watched":
        prefix = [word for word in sandbox.isolation() if word not in sandbox.OWN_PROC]
        monkeypatch.setattr(sandbox, "isolation", lambda: prefix)
    elif "--mount-proc" not in sandbox.isolation():
        pytest.skip("needs a mount namespace")
    return watched


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_whatever_files_a_program_makes_it_has_a_verdict_within_its_limit_and_leaves_nothing(
    name, watched, monkeypatch, tmp_path
):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox, "REMOVAL_S", 30.0)
    text, limit = FILES[name]
    began_s = time.monotonic()
    outcome = sandbox.run(text, b"", sandbox.SandboxLimits(wall_s=6.0, cpu_s=60, entries=1500))
    assert time.monotonic() - began_s < 6.0 + sandbox.REMOVAL_S
    limit = WATCHED.get(name, limit) if watched else limit
    assert outcome.exceeded == limit and (limit or outcome.output == b"well\n"), outcome
    assert os.listdir(tmp_path) == []


def test_folders_of_killed_verifiers_are_removed_after_a_later_program_and_others_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox, "LEFT_S", 0.0)
    (tmp_path / "april-program-left____" / "d").mkdir(parents=True)
    (tmp_path / "april-program-locked__").mkdir()
    (tmp_path / "april-program-notes").mkdir()
    lock = os.open(tmp_path / "april-program-locked__", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (tmp_path / "of-somebody").mkdir()
    (tmp_path / "april-program-link____").symlink_to(tmp_path / "of-somebody")
    sandbox.run("pass", b"", sandbox.SandboxLimits())
    os.close(lock)
    left = ["april-program-link____", "april-program-locked__", "april-program-notes", "of-somebody"]
    assert sorted(os.listdir(tmp_path)) == left


def test_removal_ends_at_its_deadline_and_goes_on_later(tmp_path):
    folder = tmp_path / "d"
    for number in range(1000):
        (folder / str(number) / "e").mkdir(parents=True)
    remove_folder(str(folder), time.monotonic())
    assert folder.exists()
    remove_folder(str(folder), time.monotonic() + 60)
    assert not folder.exists()


def test_shared_memory_counts_once():
    share = (
        "import os\nx = bytearray(400 << 20)\n"
        "for _ in range(4):\n    if os.fork() == 0:\n        import time; time.sleep(1); os._exit(0)\n"
        "for _ in range(4): os.wait()\nprint('well')"
    )
    outcome = sandbox.run(share, b"", sandbox.SandboxLimits(wall_s=30.0))
    assert (outcome.output, outcome.exceeded) == (b"well\n", "")


def test_strict_isolation_is_refused_on_a_host_that_lacks_a_layer(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation", lambda: [])
    sandbox.check_isolation("best")
    with pytest.raises(ConfigError, match=r"'reward\.code_isolation' = 'strict' .*namespaces, .*/proc"):
        sandbox.check_isolation("strict")


def test_threads_and_child_processes_work_under_full_isolation():
    text = (
        "import asyncio, subprocess, threading, concurrent.futures as c\n"
        "async def one(): await asyncio.sleep(0); return 1\n"
        "def f(n): return n + 1\n"
        "if __name__ == '__main__':\n"
        "    t = threading.Thread(target=print, args=('t',)); t.start(); t.join()\n"
        "    print(asyncio.run(one()), subprocess.run(['/bin/echo', 'e'], capture_output=True).stdout)\n"
        "    print(list(c.ThreadPoolExecutor(2).map(f, [1, 2])))\n"
    )
    outcome = sandbox.run(text, b"", sandbox.SandboxLimits(wall_s=30.0))
    assert outcome.output == b"t\n1 b'e\\n'\n[2, 3]\n", outcome.errors
