"""The images of a run's prompts and sessions: a file each in the run folder, named by the sha256 of its content.

A file is on disk before the journal record that names it; records hold names, never pixels. Files that nothing names
are removed after the journal has reclaimed space, and after a start; those that a peer has sent, once a turn or a
submitted prompt has had time to name them.
"""

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from april.broker.journal.files import Damaged
from april.data.images import PNG_HEAD_BYTES, name_of, png_size
from april.util.files import sync

FOLDER, SUFFIX, TEMPORARY = "images", ".png", ".tmp"
PIN_S = 600.0
"""Least time that an image is kept for a turn or a prompt that will name it, seconds."""


class DamagedImage(Damaged):
    """Raised for an image file that was once on disk and is missing or altered."""

    is_of_journal = False

    def __init__(self, path: Path):
        super().__init__(f"image {path} is damaged or missing; restore it from a copy")
        self.name = path.stem


class ImageStore:
    """The files of images below a run folder.

    store.keep(name, png)               # returns once it is on disk; from any thread
    store.pin(name)                     # no record names it yet
    store.read(name)
    store.reclaim_is_due = True         # after journal files were deleted
    store.reclaim(named, position, synced, now)     # in the loop: removes files that nothing names
    """

    def __init__(self, run_dir: Path):
        self.folder = run_dir / FOLDER
        self.reclaim_is_due = True
        self._unnamed: tuple[set[str], int] = set(), 0
        """(names, journal position): images that the ledger's state at that position did not need. They are removed
        once the journal is on disk up to it."""
        self._kept = {path.stem for path in self.folder.glob(f"*{SUFFIX}")}
        self._changing = threading.Lock()
        """Lock held while files are written or removed."""
        self._pinned, self._pinned_before = set[str](), set[str]()
        """Names pinned in the present period of `PIN_S` seconds (`_pinned`), and in the period before it
        (`_pinned_before`)."""
        self._period_ends = 0.0
        if self._kept:
            sync(self.folder)  # a broker that died may have left entries that are not on disk

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def keep(self, name: str, png: bytes) -> None:
        """Write the content `png` of an image file unless the file exists; it is on disk afterwards. Raises OSError."""
        with self._changing:
            if name in self._kept:
                return
            if not self.folder.is_dir():
                self.folder.mkdir()
                sync(self.folder.parent)
            temporary = self.folder / f"{name}{TEMPORARY}"
            with temporary.open("wb") as file:
                file.write(png)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path(name))
            sync(self.folder)
            self._kept.add(name)

    def read(self, name: str) -> bytes:
        """The content of an image's file. Raises DamagedImage if the file is missing or altered, so that the next
        `keep` writes it anew, and OSError if the system refuses to read it."""
        with contextlib.suppress(FileNotFoundError):
            png = self._path(name).read_bytes()
            if name_of(png) == name:
                return png
        self._kept.discard(name)
        raise DamagedImage(self._path(name))

    def size(self, name: str) -> tuple[int, int]:
        """(height, width) of an image in pixels, from the head of its file. Raises DamagedImage as `read`."""
        with contextlib.suppress(FileNotFoundError, struct.error), self._path(name).open("rb") as file:
            return png_size(file.read(PNG_HEAD_BYTES))
        self._kept.discard(name)
        raise DamagedImage(self._path(name))

    def pin(self, name: str) -> None:
        """Keep an image for at least PIN_S, also if nothing names it."""
        self._pinned.add(name)

    def pin_all(self) -> None:
        """Pin all files that an earlier broker has written, since turns or prompts that are yet to come may name some
        of them."""
        self._pinned |= self._kept

    def reclaim(self, named: Callable[[], Iterable[str]], position: int, synced: int, now: float) -> None:
        """Remove the files that nothing needs, in two steps. If `reclaim_is_due`, a call notes the images not in
        `named`, together with `position`, the journal's end. A later call removes them once `synced`, the position up
        to which the journal is on disk, has reached that. `named`: function that returns the names that the broker may
        still be asked for. `now`: seconds on any clock."""
        if now >= self._period_ends:
            self.reclaim_is_due |= bool(self._pinned_before)
            self._pinned, self._pinned_before, self._period_ends = set(), self._pinned, now + PIN_S
        unnamed, until = self._unnamed
        if unnamed and synced >= until:
            with self._changing:
                for name in unnamed.difference(named(), self._pinned, self._pinned_before):
                    self._path(name).unlink(missing_ok=True)
                    self._kept.discard(name)
            self._unnamed = set(), 0
        if self.reclaim_is_due:
            self.reclaim_is_due = False
            with self._changing:
                for leftover in self.folder.glob(f"*{TEMPORARY}"):  # of a broker that died
                    leftover.unlink()
                self._unnamed = (self._kept.difference(named()) if self._kept else set()), position

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"
