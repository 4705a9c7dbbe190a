"""The allow-list: a file with one entry `key role name` per peer, read again whenever it changes. A file that is being
written may lack lines, so a missing entry counts as removed only once the file has not changed for `SETTLE_S`.

# comment
Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID worker w7
"""

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from april.util import clock
from april.util.errors import refuse
from april.wire.security.keys import KEY_CHARACTERS, ROLES

log = logging.getLogger(__name__)

SETTLE_S = 2.0
"""Seconds without a change of the file after which removed and altered entries take effect; new entries do at once."""


@dataclass(frozen=True)
class KeyOwner:
    """The sender of a message, identified by the CURVE key of its connection."""

    key: str
    role: str
    """Role of the peer: worker | scorer | agents | learner | monitor; "" for a key that is not, or no longer, on the
    list."""
    name: str


class AllowList:
    """The admitted peers, by key. Used by the handshake thread and by the owner's thread.

    `refresh` reads a changed file again: new keys count at once, removals and changes after `SETTLE_S`. A file that
    cannot be read, has an invalid entry or names nobody is no list: this is logged, and the list stays as it was.
    """

    def __init__(self, path: Path):
        """Raises ConfigError if the file cannot be read, has an invalid entry or names nobody."""
        self.path = path
        self._lock = threading.Lock()
        self._file_state, self._changed_s = self._stat(), clock.now()
        self._is_settled = False
        self._peers = self._read()
        self._changes = 0

    def find(self, key: str) -> KeyOwner:
        """The owner of a key (in Z85 encoding); the role is "" if the key is not on the list."""
        return self._peers.get(key) or KeyOwner(key, "", "")

    def refresh(self) -> int:
        """Read the file again if it has changed; returns the number of changes of the list since it was first read."""
        with self._lock:
            file_state, now = self._stat(), clock.now()
            if file_state != self._file_state:
                self._file_state, self._changed_s, self._is_settled = file_state, now, False
            if not self._is_settled:
                self._is_settled = now - self._changed_s >= SETTLE_S
                self._read_again()
            return self._changes

    def _read_again(self) -> None:
        try:
            peers = self._read() if self._is_settled else self._read() | self._peers
        except ValueError as error:
            if self._is_settled:
                log.error("the allow-list stays as it was: %s", error)
            return
        if peers != self._peers:
            self._peers, self._changes = peers, self._changes + 1
            log.info("the allow-list %s names %d keys now", self.path, len(peers))

    def _read(self) -> dict[str, KeyOwner]:
        peers = read(self.path)
        if not peers:
            refuse("security.keys", self.path, "names no key", "list at least one peer, as `april keygen` does")
        return peers

    def _stat(self) -> tuple[int, ...] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def read(path: Path) -> dict[str, KeyOwner]:
    """Read the peers in an allow-list file, by key. Raises ConfigError, which names the invalid entry."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        refuse("security.keys", path, f"cannot be read ({error.strerror})", "make it with `april keygen`")
    except UnicodeDecodeError:
        refuse("security.keys", path, "is not text", "make it anew with `april keygen`")
    peers: dict[str, KeyOwner] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 3 or len(words[0]) != KEY_CHARACTERS or words[1] not in ROLES:
            refuse(
                "security.keys",
                path,
                f"has a line {number} that is not `key role name`",
                f"roles are {', '.join(ROLES)}",
            )
        if words[0] in peers:
            refuse("security.keys", path, f"names the key of line {number} twice", "take one of the lines out")
        peers[words[0]] = KeyOwner(*words)
    return peers
