"""Runs `program.py` of the working folder under limits: `sandbox_runner.py LIMITS [no sockets]`; `sandbox` starts it.

A process limit holds for a user, and for root not at all, so root becomes a user that nobody else is. Where the kernel
has Landlock, the program reads the interpreter and the system's libraries, writes its own folder, and opens no other
file.
"""

import contextlib
import ctypes
import json
import os
import resource
import runpy
import stat
import struct
import sys
import sysconfig

FIRST_UID, UIDS = 50_000, 10_000
CAPABILITY_VERSION, CAP_DAC_READ_SEARCH = 0x20080522, 1 << 2
PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 8, 38
REFUSED = "socket."
MIB = 1 << 20
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""numbers of Landlock's system calls, the same on every architecture"""
ABI_ONLY, BENEATH_A_PATH = 1, 1
EXECUTE, READ_FILE, READ_FOLDER = 1 << 0, 1 << 2, 1 << 3
READING = EXECUTE | READ_FILE | READ_FOLDER
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""how many rights on files each version of Landlock knows; later ones 16"""
FIRST_WITH_TCP, TCP = 4, 0b11
FIRST_WITH_SCOPES, SCOPES = 6, 0b11
"""sockets without a path, and signals, of processes outside"""
SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib32", "/lib64",
          "/usr/bin", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/proc")  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def main() -> None:
    limits, no_sockets = json.loads(sys.argv[1]), len(sys.argv) > 2 and bool(sys.argv[2])
    folder = os.getcwd()
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
    if no_sockets:
        sys.addaudithook(refuse)
    sys.argv = ["program.py"]
    sys.path.insert(0, folder)
    runpy.run_path("program.py", run_name="__main__")


def become_nobody(folder: str) -> None:
    """Change from root to a user of this process alone, who can read what it needs of the interpreter."""
    if os.getuid():
        return
    uid, keep = FIRST_UID + int.from_bytes(os.urandom(4), "little") % UIDS, not all_can_read(os.__file__)
    libc = ctypes.CDLL(None)
    try:
        os.chown(folder, uid, uid)
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
    """Let this process and all that it starts open nothing but what a program needs; not at all without Landlock."""
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
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        kept = rights if os.path.isdir(path) else rights & OF_FILES
        libc.syscall(ADD_RULE, rules, BENEATH_A_PATH, struct.pack("=Qi", kept, place), ctypes.c_uint32(0))
        os.close(place)


def all_can_read(path: str) -> bool:
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
    return True


def refuse(event: str, arguments: tuple) -> None:
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is not for a program that is being tested")


main()
