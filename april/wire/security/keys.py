"""CURVE key files: the identity of a process, and the broker that it trusts.

A key file is TOML with role, name, public and secret key, and the broker's public key; keys are in Z85. A folder made
by `april keygen` has one key file per role, named after the role.
"""

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

from april.util.errors import refuse

ALLOW_LIST = "allow-list"
"""Name of the file in a folder of keys that lists the public keys of the peers that may connect, with their roles and
names."""
RUN_KEYS = "keys"
"""Name of the folder, in the run folder, with the keys that April makes for the run."""
ROLES = ("worker", "scorer", "agents", "learner", "monitor")
KEY_CHARACTERS = 40
WITHOUT_MODES = "give another 'run.dir', or a folder that `april keygen` has made elsewhere"
"""Advice in the error for a file system without file modes (Windows drives under WSL, CIFS, FUSE), where a key file
cannot be private."""


@dataclass(frozen=True)
class Keys:
    """The content of a key file."""

    role: str
    """Role of the process: broker | worker | scorer | agents | learner | monitor."""
    name: str
    public: str
    secret: str = field(repr=False)
    broker: str
    """CURVE public key of the broker to which this process connects, in Z85."""


def find_key_file(keys: Path, role: str) -> Path:
    """Find the key file of a role. `keys`: a folder with the file ROLE.key, or that file itself."""
    return keys / f"{role}.key" if keys.is_dir() else keys


@overload
def load_keys(keys: Path, role: str) -> Keys: ...
@overload
def load_keys(keys: Path | None, role: str) -> Keys | None: ...
def load_keys(keys: Path | None, role: str) -> Keys | None:
    """The key file for a process of this `role`, found in `keys` as by `find_key_file`; None if `keys` is None, in a
    run without keys. Raises ConfigError."""
    if keys is None:
        return None
    path = find_key_file(keys, role)
    try:
        with path.open("rb") as file:
            if is_open_to_others(os.fstat(file.fileno())):
                fix = f"run `chmod 600 {path}`; if that does nothing, {WITHOUT_MODES}"
                refuse("security.keys", path, "can be read by others", fix)
            tree = tomllib.load(file)
        found = Keys(**tree)
    except OSError as error:
        fix = "connect by the run's folder, give a copy of the key file made there, or make one with `april keygen`"
        refuse("security.keys", path, f"cannot be read ({error.strerror})", fix)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError):
        refuse("security.keys", path, "is no key file", "make it with `april keygen`")
    if any(len(key) != KEY_CHARACTERS for key in map(str, (found.public, found.secret, found.broker))):
        refuse("security.keys", path, "holds a key that is not one", "make it anew with `april keygen`")
    if found.role != role:
        refuse("security.keys", path, f"holds the key of a {found.role}", f"give a {role}'s")
    return found


def is_open_to_others(file: os.stat_result) -> bool:
    """Whether users other than its owner can read a key file.

    The process's group may read a file that root owns, as is the case for a Secret in a pod without root.
    """
    group_may_read = file.st_uid == 0 != os.geteuid()
    return bool(file.st_mode & (0o037 if group_may_read else 0o077))
