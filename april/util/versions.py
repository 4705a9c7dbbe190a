"""Version numbers of the journal, the run folder and the protocol. Folders and peers of another version are refused
with a sentence that names the April version to use.

A change to one of the three adds the next number to its table; each earlier number keeps the last April version that
supports it. A folder records its number and the April version that wrote it in its file `format`, so an older April can
name the newer one.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from april.util.errors import ConfigError
from april.version import VERSION

PROTOCOLS = {16: "0.2"}
"""Protocol number -> the last April version that speaks it. Earlier numbers were never released."""
PROTOCOL = max(PROTOCOLS)
"""Number of the protocol that this April speaks with the other processes of a run: the largest in PROTOCOLS."""
FILE = "format"
FIRST = 1
"""Format number of a folder that has no file `format`."""


class OtherApril(ConfigError):
    """A folder was written by another April version, which the text names."""


class Stamp(msgspec.Struct, frozen=True):
    """Content of the file `format` in a journal or run folder: the folder's format number, and who wrote it."""

    format: int
    april: str
    """April version that created the folder."""


@dataclass(frozen=True)
class Form:
    """The format numbers that a kind of folder, such as the journal, has had. A folder's own number is in its stamp,
    the file `format`.

    JOURNAL.claim(folder, new=not any(folder.iterdir()))     # new: writes the stamp; otherwise: checks it
    """

    kind: str
    aprils: dict[int, str]
    """Format number -> the last April version (MAJOR.MINOR) that reads it. New folders get the largest number."""

    @property
    def current(self) -> int:
        return max(self.aprils)

    def claim(self, folder: Path, new: bool) -> None:
        """Write and sync the stamp of a new folder; check any other folder. Raises OtherApril."""
        if not new or (folder / FILE).exists():
            return self.check(folder)
        with (folder / f"{FILE}.tmp").open("wb") as file:
            file.write(msgspec.json.encode(Stamp(self.current, VERSION)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, folder / FILE)

    def check(self, folder: Path) -> None:
        """Raise OtherApril unless the folder has the current format."""
        stamp = read_stamp(folder / FILE)
        if stamp.format == self.current:
            return
        april = self.aprils.get(stamp.format) or minor(stamp.april)
        raise OtherApril(
            f"{self.kind} {folder} was written by April {april} (format {stamp.format}, where this April "
            f"{minor(VERSION)} has {self.current}); finish it with april-rl=={april}.*, or choose another run.name"
        )


def read_stamp(path: Path) -> Stamp:
    """The stamp in a file `format`. Raises OtherApril if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Stamp)
    except FileNotFoundError:
        return Stamp(FIRST, "")
    except msgspec.DecodeError as error:
        raise OtherApril(
            f"{path} does not say which April wrote its folder ({error}); restore it from a copy"
        ) from None


def minor(version: str) -> str:
    """MAJOR.MINOR of a version: `0.2` for `0.2.1`."""
    return ".".join(version.split(".")[:2])


JOURNAL = Form("journal", {1: "0.1", 15: "0.2"})
"""Format numbers of the journal: of its records, events and snapshots. Numbers 2 to 14 were never released."""
RUN_FOLDER = Form("run folder", {1: "0.1", 4: "0.2"})
"""Format numbers of the run folder: of configuration, metrics, summary, samples and checkpoints. Numbers 2 and 3 were
never released."""


def protocols_differ(other: str, theirs: int, own: str) -> str:
    """The sentence for two sides with different protocols. `other`, `own`: the two sides' names; `theirs`: the other
    side's protocol number."""
    april = (
        f"April {PROTOCOLS[theirs]}"
        if theirs in PROTOCOLS
        else f"{'an earlier' if theirs < PROTOCOL else 'a later'} April"
    )
    return (
        f"{other} speaks protocol {theirs} ({april}), {own} protocol {PROTOCOL} (April {minor(VERSION)}); "
        "install the same April for both"
    )
