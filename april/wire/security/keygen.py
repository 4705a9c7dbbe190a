"""Makes keys: a folder with the broker's key, its peers' keys and the allow-list, as `april keygen` and each run whose
broker listens on TCP do, and secrets of HTTP servers."""

import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq

from april.util.errors import ConfigError, refuse
from april.wire.security.allow_list import read
from april.wire.security.keys import ALLOW_LIST, ROLES, WITHOUT_MODES, Keys, find_key_file, is_open_to_others, load_keys

FOLDER_MODE, FILE_MODE = 0o700, 0o600


def make_folder(folder: Path) -> list[Path]:
    """Make the keys of all parts of a run; returns the written files. Raises ConfigError rather than replace a key."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(FOLDER_MODE)
    except OSError as error:
        raise ConfigError(f"folder {str(folder)!r} cannot be made ({error.strerror}); give another") from None
    public, secret = new_pair()
    paths = [write_key(folder, Keys("broker", "broker", public, secret, public))]
    write_new(folder / ALLOW_LIST, "# key, role, name of every peer that the broker and the learner let in\n")
    paths.append(folder / ALLOW_LIST)
    return paths + [add_peer(folder, role, role) for role in ROLES]


def make_folder_once(folder: Path) -> None:
    """Create a folder of keys unless it exists; other processes see it complete or not at all. Raises ConfigError."""
    make_once(folder, make_folder)


def make_secret_once(path: Path) -> None:
    """Create a private file with a random secret of 256 bits, in hex, unless it exists. Raises ConfigError."""
    make_once(path, lambda draft: write_new(draft, f"{secrets.token_hex(32)}\n"))


def make_once(path: Path, make: Callable[[Path], object]) -> None:
    """Create a file or folder unless it exists; `make(draft)` writes it at the path `draft`, and the whole then moves
    to `path`. If several processes do so at once, one wins, and all find its complete result. Raises ConfigError."""
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent, ignore_cleanup_errors=True) as own:
            draft = Path(own, path.name)
            make(draft)
            with suppress(OSError):  # folders have no hard links, and some file systems have none
                os.link(draft, path)
            if not path.exists():
                draft.rename(path)
    except OSError as error:
        if not path.exists():
            raise ConfigError(f"{str(path)!r} cannot be made ({error.strerror}); give another folder") from None


def add_peer(folder: Path, role: str, name: str) -> Path:
    """Make the key of another peer, with this role and name, and add it to the allow-list; returns the key file. Raises
    ConfigError."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        refuse("--name", name, "is no name", "use letters, digits, '.', '-' and '_'")
    broker = load_keys(folder, "broker")
    allow_list = folder / ALLOW_LIST
    if any(peer.name == name for peer in read(allow_list).values()):
        refuse("--name", name, f"is on {allow_list} already", "use another, or take that line out")
    public, secret = new_pair()
    path = write_key(folder, Keys(role, name, public, secret, broker.public))
    with allow_list.open("a") as file:
        file.write(f"{public} {role} {name}\n")
    return path


def new_pair() -> tuple[str, str]:
    """A (public, secret) key pair in Z85. The public key has no `#`, which begins a comment in the allow-list."""
    while True:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        if "#" not in public:
            return public, secret


def write_key(folder: Path, keys: Keys) -> Path:
    lines = [f'{name} = "{value}"\n' for name, value in vars(keys).items()]
    path = find_key_file(folder, keys.name)
    write_new(path, f"# whoever has this file is the {keys.role} {keys.name}\n{''.join(lines)}")
    return path


def write_new(path: Path, text: str) -> None:
    """Write a file with the content `text` that only this user may read. Raises ConfigError, also if it is there
    already."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "w") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"file {str(path)!r} cannot be made ({error.strerror}); add a peer with --role and --name, "
            "or give another folder"
        ) from None
    if is_open_to_others(path.stat()):
        path.unlink()
        raise ConfigError(f"others could read file {str(path)!r}: its file system has no modes; {WITHOUT_MODES}")
