"""CURVE keys on disk: who a process is, and which broker it trusts.

A key file is TOML: role, name, public and secret key, and the broker's public key, keys in Z85. A folder made by
`april keygen` holds one for each part that runs on this machine, named after its role.
"""

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

from april.config import ConfigError

ALLOW_LIST = "allow-list"
"""file of a key folder"""
ROLES = ("worker", "scorer", "agents", "learner", "monitor")
KEY_CHARACTERS = 40


@dataclass(frozen=True)
class Keys:
    role: str
    """broker, worker, scorer, agents, learner or monitor"""
    name: str
    public: str
    secret: str = field(repr=False)
    broker: str
    """the broker's public key"""


def find_key_file(keys: Path, role: str) -> Path:
    """`keys` is a folder with the file ROLE.key, or that file itself."""
    return keys / f"{role}.key" if keys.is_dir() else keys


@overload
def load_keys(keys: Path, role: str) -> Keys: ...
@overload
def load_keys(keys: Path | None, role: str) -> Keys | None: ...
def load_keys(keys: Path | None, role: str) -> Keys | None:
    """The keys of this process, None where `security.keys` is not set. Raises ConfigError."""
    if keys is None:
        return None
    path = find_key_file(keys, role)
    try:
        with path.open("rb") as file:
            if is_open_to_others(os.fstat(file.fileno())):
                raise refusal(path, "can be read by others", f"run `chmod 600 {path}`")
            tree = tomllib.load(file)
        found = Keys(**tree)
    except OSError as error:
        raise refusal(path, f"cannot be read ({error.strerror})", "make it with `april keygen`") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError):
        raise refusal(path, "is no key file", "make it with `april keygen`") from None
    if any(len(key) != KEY_CHARACTERS for key in map(str, (found.public, found.secret, found.broker))):
        raise refusal(path, "holds a key that is not one", "make it anew with `april keygen`")
    if found.role != role:
        raise refusal(path, f"holds the key of a {found.role}", f"give a {role}'s")
    return found


def is_open_to_others(file: os.stat_result) -> bool:
    """One of root's may be read by the group that this process is in, as a Secret in a pod that is not root's is."""
    lent = file.st_uid == 0 != os.geteuid()
    return bool(file.st_mode & (0o037 if lent else 0o077))


def refusal(path: Path, what: str, mend: str) -> ConfigError:
    return ConfigError(f"key 'security.keys': {str(path)!r} {what}; {mend}")
