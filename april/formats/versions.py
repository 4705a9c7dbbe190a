"""Journal, run folder and protocol have a number each; what another April wrote or says is refused with its name.

Whoever changes one of the three appends the next number to its table. The number before keeps the last April that goes
on with it. A folder says its number, and who wrote it, in its file `format`, so that an April that is older than a
number can name the one that knows it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from april.config import ConfigError
from april.version import VERSION
from april.wire import PROTOCOL

PROTOCOLS = {6: "0.2"}
"""number -> the last April that speaks it; those before belong to nothing that was ever installed"""
FILE = "format"
FIRST = 1
"""of a folder without that file"""


class OtherApril(ConfigError):
    """A folder is of another April; the text says of which."""


class Stamp(msgspec.Struct, frozen=True):
    format: int
    april: str
    """version of the one that wrote it"""


@dataclass(frozen=True)
class Form:
    """Of one kind of folder.

    JOURNAL.claim(folder, new=not any(folder.iterdir()))     # says what it is, or is refused
    """

    kind: str
    aprils: dict[int, str]
    """number -> the last April that goes on with it, as MAJOR.MINOR; the last number is written now"""

    @property
    def current(self) -> int:
        return max(self.aprils)

    def claim(self, folder: Path, new: bool) -> None:
        """Mark a new folder as this April's; check any other. What is written is on disk afterwards."""
        if not new or (folder / FILE).exists():
            return self.check(folder)
        with (folder / f"{FILE}.tmp").open("wb") as file:
            file.write(msgspec.json.encode(Stamp(self.current, VERSION)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, folder / FILE)

    def check(self, folder: Path) -> None:
        """Raises OtherApril."""
        stamp = read_stamp(folder / FILE)
        if stamp.format == self.current:
            return
        april = self.aprils.get(stamp.format) or minor(stamp.april)
        raise OtherApril(
            f"{self.kind} {folder} was written by April {april} (format {stamp.format}, where this April "
            f"{minor(VERSION)} has {self.current}); finish it with april-rl=={april}.*, or choose another run.name"
        )


def read_stamp(path: Path) -> Stamp:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Stamp)
    except FileNotFoundError:
        return Stamp(FIRST, "")
    except msgspec.DecodeError as error:
        raise OtherApril(
            f"{path} does not say which April wrote its folder ({error}); restore it from a copy"
        ) from None


def minor(version: str) -> str:
    """`0.2` of `0.2.1`."""
    return ".".join(version.split(".")[:2])


JOURNAL = Form("journal", {1: "0.1", 6: "0.2"})
"""records, events and snapshots; 2 to 5 are of nothing that was ever installed"""
RUN_FOLDER = Form("run folder", {1: "0.1", 3: "0.2"})
"""configuration, metrics, summary and checkpoints; 2 is of nothing that was ever installed"""


def protocols_differ(other: str, theirs: int, own: str) -> str:
    """The sentence for a peer that speaks protocol `theirs`; `other` and `own` say who the two are."""
    april = (
        f"April {PROTOCOLS[theirs]}"
        if theirs in PROTOCOLS
        else f"{'an earlier' if theirs < PROTOCOL else 'a later'} April"
    )
    return (
        f"{other} speaks protocol {theirs} ({april}), {own} protocol {PROTOCOL} (April {minor(VERSION)}); "
        "install the same April for both"
    )
