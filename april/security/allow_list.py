"""Whom a key belongs to: the file with lines `key role name`, read again whenever it changes.

# comment
Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID worker w7
"""

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from april.security.keys import KEY_CHARACTERS, ROLES, refusal

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peer:
    """Who has sent a message, by the key of its connection."""

    key: str
    role: str
    """worker, scorer, learner, monitor; "" for a key that is not on the list (any more)"""
    name: str


class AllowList:
    """Asked by the handshake's thread and by the owner's, which calls `refresh` from time to time.

    A file that cannot be read, or holds a line that is none, leaves the list as it was and is logged.
    """

    def __init__(self, path: Path):
        """Raises ConfigError."""
        self.path = path
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._peers = read(path)
        self._changes = 0

    def find(self, key: str) -> Peer:
        return self._peers.get(key) or Peer(key, "", "")

    def refresh(self) -> int:
        """Read the file if it has changed; returns how many times the list has become another one so far."""
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                self._read_again()
            return self._changes

    def _read_again(self) -> None:
        try:
            peers = read(self.path)
        except ValueError as error:
            return log.error("the allow-list stays as it was: %s", error)
        if peers != self._peers:
            self._peers, self._changes = peers, self._changes + 1
            log.info("the allow-list %s names %d keys now", self.path, len(peers))

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def read(path: Path) -> dict[str, Peer]:
    """Peers by key. Raises ConfigError, which names the line."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise refusal(path, f"cannot be read ({error.strerror})", "make it with `april keygen`") from None
    except UnicodeDecodeError:
        raise refusal(path, "is not text", "make it anew with `april keygen`") from None
    peers: dict[str, Peer] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 3 or len(words[0]) != KEY_CHARACTERS or words[1] not in ROLES:
            raise refusal(path, f"has a line {number} that is not `key role name`", f"roles are {', '.join(ROLES)}")
        if words[0] in peers:
            raise refusal(path, f"names the key of line {number} twice", "take one of the lines out")
        peers[words[0]] = Peer(*words)
    return peers
