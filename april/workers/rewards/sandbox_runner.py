"""Runs `program.py` of the working folder under limits: `sandbox_runner.py LIMITS [no sockets]`; `sandbox` starts it.

A process limit holds for a user, and for root not at all, so root becomes a user that nobody else is.
"""

import ctypes
import json
import os
import resource
import runpy
import stat
import sys

FIRST_UID, UIDS = 50_000, 10_000
CAPABILITY_VERSION, CAP_DAC_READ_SEARCH = 0x20080522, 1 << 2
PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS = 8, 38
REFUSED = "socket."
MIB = 1 << 20


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
