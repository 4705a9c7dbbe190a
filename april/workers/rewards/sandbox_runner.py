"""Runs `program.py` of the working folder under limits: `sandbox_runner.py LIMITS SOCKETS GROUP MOUNTS`, started by
`sandbox`.
`sandbox_runner.py layers` prints which isolation layers the kernel has.

A process limit holds per user, and not for root, so root changes to a user id that no other process has. With Landlock,
the program can read the interpreter and the system's libraries, write its own folder, and open no other file. With
seccomp, the system calls in FORBIDDEN are refused.
"""

import ast
import builtins
import contextlib
import ctypes
import errno
import importlib
import json
import os
import resource
import runpy
import stat
import struct
import sys
import sysconfig

HEADER = ("typing", "collections", "math", "itertools", "functools", "heapq", "bisect", "string", "re", "datetime",
          "copy", "random", "operator", "statistics", "decimal", "fractions", "dataclasses", "abc", "enum")  # fmt: skip
"""Modules whose public names a program may use without an import, as on LeetCode. If several modules have a name, that
of the first counts."""
START = """import site, sys
site.addsitedir = lambda folder, *_: sys.path.append(folder)
site.main()
from importlib.machinery import SourceFileLoader
del sys.argv[0]
exec(SourceFileLoader("__main__", sys.argv[0]).get_code("__main__"))"""
"""Python that runs the script at the path in its first argument, from its bytecode if that is cached. The interpreter
has the option -S: it runs no hook of a package (.pth file), which may take longer than all else at a start."""
STARTS = "\0the program starts\n"
"""Line that is printed before a program runs: output before it is the interpreter's, and not the program's."""
DEEPEST_RECURSION = 50_000
FIRST_UID, UIDS = 50_000, 10_000
CAPABILITY_VERSION, CAP_DAC_READ_SEARCH = 0x20080522, 1 << 2
PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 8, 38
REFUSED = "socket."
MIB = 1 << 20
NOSUID, NODEV = 2, 4
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System call numbers of Landlock, the same on every architecture."""
ABI_ONLY, BENEATH_A_PATH = 1, 1
EXECUTE, READ_FILE, READ_FOLDER = 1 << 0, 1 << 2, 1 << 3
READING = EXECUTE | READ_FILE | READ_FOLDER
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file rights in each version of Landlock; later versions have 16."""
FIRST_WITH_TCP, TCP = 4, 0b11
FIRST_WITH_SCOPES, SCOPES = 6, 0b11
"""First version of Landlock with scopes, and bits of the scopes: abstract sockets, signals to processes outside."""
SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib32", "/lib64",
          "/usr/bin", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/proc")  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

FORBIDDEN = {
    "socket": (41, 198), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "open_by_handle_at": (304, 265), "kexec_load": (246, 104),
}  # fmt: skip
"""System calls that a program under test must not make: name -> (number on x86_64, number on aarch64)."""
ARCHITECTURES = {"x86_64": (0xC000003E, 0, 56), "aarch64": (0xC00000B7, 1, 220)}
"""Architecture -> (its audit number, its index in FORBIDDEN's tuples, its system call number of clone)."""
CLONE3, NEW_NAMESPACES, X32 = 435, 0x7E020080, 0x40000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Byte offsets of system call number, architecture and first argument in the struct that a seccomp filter reads."""
KILL, REFUSE, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
PR_GET_SECCOMP, PR_SET_SECCOMP, FILTER = 21, 22, 2


def main() -> None:
    print(end=STARTS, flush=True)
    if sys.argv[1] == "layers":
        return print(json.dumps(isolation_layers()))
    limits, no_sockets, group = json.loads(sys.argv[1]), bool(sys.argv[2]), sys.argv[3]
    own_mounts = bool(sys.argv[4])
    folder = os.getcwd()
    enter(group)
    if own_mounts:
        mount_files(folder, limits)
    become_nobody(folder)
    for name, value in (
        ("RLIMIT_CPU", limits["cpu_s"]),
        ("RLIMIT_AS", limits["memory_mb"] * MIB),
        ("RLIMIT_FSIZE", limits["file_mb"] * MIB),
        ("RLIMIT_NOFILE", limits["open_files"]),
        ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_CORE", 0),
    ):
        resource.setrlimit(getattr(resource, name), (value, value))
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    confine(folder)
    filter_calls()
    if no_sockets:
        sys.addaudithook(refuse)
    sys.argv = ["program.py"]
    sys.path.insert(0, folder)
    with contextlib.suppress(SyntaxError, ValueError, RecursionError), open("program.py", encoding="utf-8") as file:
        vars(builtins).update(header(unbound_names(ast.parse(file.read()))))
    sys.setrecursionlimit(DEEPEST_RECURSION)
    runpy.run_path("entry.py" if os.path.exists("entry.py") else "program.py", run_name="__main__")


def unbound_names(tree: ast.AST) -> set[str]:
    """Names that a program uses and binds nowhere, and that are no built-ins."""
    used, bound = set[str](), set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(name := getattr(node, "name", None), str):
            bound.add(name)
    return used - bound


def header(names: set[str]) -> dict[str, object]:
    """Those of `names` that are a module of the standard library or a public name of a module in HEADER, with their
    values."""
    found: dict[str, object] = {}
    for name in names:
        if name in sys.stdlib_module_names and not name.startswith("_") and name not in ("this", "antigravity"):
            with contextlib.suppress(ImportError):
                found[name] = importlib.import_module(name)
    for module in HEADER:
        if names <= found.keys():
            break
        public = importlib.import_module(module)
        exported = getattr(public, "__all__", [name for name in vars(public) if not name.startswith("_")])
        found = {name: getattr(public, name) for name in names.intersection(exported)} | found
    return found


def enter(group: str) -> None:
    """Enter the control group at a path; its limits then hold for this process and all it starts."""
    if group:
        with contextlib.suppress(OSError), open(f"{group}/cgroup.procs", "w") as file:
            file.write("0")


def mount_files(folder: str, limits: dict) -> None:
    """Mount a file system in memory over the folder, with the files that are in it. The kernel enforces `limits`:
    `files_mb` and `entries` of `SandboxLimits`.

    No other mount namespace sees the file system, and it ends with the namespace of this process. Without permission to
    mount, nothing happens.
    """
    contents = {}
    for name in os.listdir(folder):
        with open(name, "rb") as file:
            contents[name] = file.read()
    options = f"size={limits['files_mb']}m,nr_inodes={limits['entries']},mode=700"
    if ctypes.CDLL(None).mount(b"files", os.fsencode(folder), b"tmpfs", NOSUID | NODEV, options.encode()):
        return
    os.chdir(folder)
    for name, content in contents.items():
        with open(name, "wb") as file:
            file.write(content)


def become_nobody(folder: str) -> None:
    """Change from root to an unused user id, which owns the working folder and its files, and keeps the right to read
    the interpreter."""
    if os.getuid():
        return
    uid, keep = FIRST_UID + int.from_bytes(os.urandom(4), "little") % UIDS, not all_can_read(os.__file__)
    libc = ctypes.CDLL(None)
    try:
        for path in (folder, *os.listdir(folder)):
            os.chown(path, uid, uid)
        os.setgroups([])
        os.setgid(uid)
        if keep:
            libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setuid(uid)
    except OSError:
        return
    if keep:
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
        sets = (ctypes.c_uint32 * 6)(CAP_DAC_READ_SEARCH, CAP_DAC_READ_SEARCH, 0, 0, 0, 0)
        libc.capset(header, sets)


def confine(folder: str) -> None:
    """Let this process and its children open only the files that a program needs: `folder`, which they may write, the
    interpreter and the system's libraries. No-op without Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(ABI_ONLY))
    if version < 1:
        return
    handled = (1 << FILE_RIGHTS.get(version, 16)) - 1
    fields = [handled]
    fields += [TCP] if version >= FIRST_WITH_TCP else []
    fields += [SCOPES] if version >= FIRST_WITH_SCOPES else []
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if rules < 0:
        raise OSError(ctypes.get_errno(), "no Landlock rules")
    interpreter = {os.path.realpath(sys.executable), *map(sysconfig.get_path, ("stdlib", "platstdlib"))}
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), os.path.join(sys.base_prefix, "lib")}
    for path in (*SYSTEM, *interpreter, *libraries):
        allow(libc, rules, path, READING & handled)
    for path in DEVICES:
        allow(libc, rules, path, OF_FILES & handled)
    allow(libc, rules, folder, handled)
    if libc.syscall(RESTRICT_SELF, rules, ctypes.c_uint32(0)):
        raise OSError(ctypes.get_errno(), "Landlock refuses")
    os.close(rules)


def allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        kept = rights if os.path.isdir(path) else rights & OF_FILES
        libc.syscall(ADD_RULE, rules, BENEATH_A_PATH, struct.pack("=Qi", kept, descriptor), ctypes.c_uint32(0))
        os.close(descriptor)


def filter_calls() -> None:
    """Refuse FORBIDDEN system calls to this process and its children. No-op without seccomp.

    clone3, whose flags a filter cannot see, reports that it does not exist, so that libraries use clone.
    """
    if not (rules := call_filter()) or not isolation_layers()["seccomp"]:
        return
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    program = struct.pack("@HP", len(rules), ctypes.addressof(buffer))
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_SECCOMP, FILTER, program):
        raise OSError(ctypes.get_errno(), "seccomp refuses")


def call_filter() -> list[tuple[int, int, int, int]]:
    """Instructions (code, jump if true, jump if false, value) of the system call filter; none on unknown processors."""
    if os.uname().machine not in ARCHITECTURES:
        return []
    audited, index, clone = ARCHITECTURES[os.uname().machine]
    numbers = [by_architecture[index] for by_architecture in FORBIDDEN.values()]
    rules = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, audited), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    rules += [(EQUAL, len(numbers) - position + 6, 0, number) for position, number in enumerate(numbers)]
    return [
        *rules,
        (AT_LEAST, 6, 0, X32),
        (EQUAL, 3, 0, clone),
        (EQUAL, 1, 0, CLONE3),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]


def isolation_layers() -> dict[str, bool]:
    libc = ctypes.CDLL(None)
    landlock = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(ABI_ONLY))
    filtered = os.uname().machine in ARCHITECTURES and libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0
    return {"Landlock": landlock >= 1, "seccomp": filtered}


def all_can_read(path: str) -> bool:
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
    return True


def refuse(event: str, arguments: tuple) -> None:
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is not for a program that is being tested")


if __name__ == "__main__":
    main()
