"""What the watched broker leaves in `chaos/` of its run folder, for those who kill it and for those who judge it."""

import os
import random
import struct
from pathlib import Path

import msgpack

SYNC_OFF = "APRIL_TEST_SYNC_OFF"
NOW = struct.Struct("<16sQ")
"""phase and tokens acknowledged so far"""


class RunState:
    def __init__(self, run_dir: Path):
        self.journal = run_dir / "journal"
        self.folder = run_dir / "chaos"
        for name in ("synced", "reclaimed"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._now = os.open(self.folder / "now", os.O_RDWR | os.O_CREAT)
        self._promises = os.open(self.folder / "promises.msgpack", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    # --- written by the broker ------------------------------------------------------------------------------

    def set_phase(self, phase: str, tokens: int | None = None) -> None:
        os.pwrite(self._now, NOW.pack(phase.encode(), self.now()[1] if tokens is None else tokens), 0)

    def promise(self, promise: list) -> None:
        os.write(self._promises, msgpack.packb(promise))

    def synced(self, path: str, size: int) -> None:
        mark = os.open(self.folder / "synced" / Path(path).name, os.O_WRONLY | os.O_CREAT)
        os.pwrite(mark, size.to_bytes(8), 0)
        os.close(mark)

    @property
    def disk_is_full(self) -> bool:
        return (self.folder / "full").exists()

    def keep(self, segment: Path) -> None:
        """Let the judge read a segment that the broker is about to remove."""
        kept = self.folder / "reclaimed" / segment.name
        if segment.exists() and not kept.exists():
            kept.hardlink_to(segment)

    # --- for the others ---------------------------------------------------------------------------------

    def now(self) -> tuple[str, int]:
        """(phase, tokens acknowledged so far)"""
        data = os.pread(self._now, NOW.size, 0)
        if len(data) < NOW.size:
            return "starting", 0
        phase, tokens = NOW.unpack(data)
        return phase.rstrip(b"\0").decode(), tokens

    def promises(self) -> list[list]:
        with (self.folder / "promises.msgpack").open("rb") as file:
            return list(msgpack.Unpacker(file))

    def segments(self) -> list[Path]:
        """Every file the journal ever had, oldest first."""
        found = {path.name: path for path in (self.folder / "reclaimed").iterdir()}
        found |= {path.name: path for path in self.journal.glob("*.msgpack")}
        return [found[name] for name in sorted(found)]

    def fill_disk(self, full: bool) -> None:
        mark = self.folder / "full"
        mark.touch() if full else mark.unlink()

    def lose_power(self, everything: bool = False) -> int:
        """Cut the journal of a dead broker at its last sync or somewhere behind it; the bytes that are gone."""
        lost = 0
        for path, safe, size in self.reach():
            if size > safe:
                end = safe if everything else random.choice([safe, random.randint(safe, size)])
                os.truncate(path, end)
                lost += size - end
        return lost

    def reach(self) -> list[tuple[Path, int, int]]:
        """(journal file, bytes that a sync has reached, bytes), oldest first"""
        found = []
        for path in sorted(self.journal.glob("*.msgpack")):
            mark = self.folder / "synced" / path.name
            found.append((path, int.from_bytes(mark.read_bytes()) if mark.exists() else 0, path.stat().st_size))
        return found
