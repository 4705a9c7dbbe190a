"""Where a run's journal lies: in the run's folder, or on a disk of its own.

Then a link in the run's folder leads there, so that whoever looks for the journal finds it in one place.
"""

import os
from pathlib import Path

from april.broker.journal.files import JournalError
from april.files.disk import sync


def journal_of(run_dir: Path) -> Path:
    """Its folder, or where it would be. Raises JournalError where it lies on a disk that is not here."""
    folder = run_dir / "journal"
    if folder.is_symlink() and not folder.is_dir():
        raise JournalError(f"journal {folder} lies in {folder.readlink()}, which is not here; mount that disk")
    return folder


def place_journal(run_dir: Path, apart: Path | None) -> Path:
    """The same, and a new one is begun in `apart`, under the run's name. Raises JournalError, or OSError."""
    folder = journal_of(run_dir)
    if apart is None:
        return folder
    wanted = apart / run_dir.name
    if not os.path.lexists(folder):
        wanted.mkdir(parents=True, exist_ok=True)
        if any(wanted.iterdir()):
            raise JournalError(
                f"folder {wanted} has another run's journal; remove it, or choose another run.name. If it is this "
                f"run's, make {folder} a link to it"
            )
        folder.symlink_to(wanted)
        sync(run_dir)
    elif not (wanted.is_dir() and folder.samefile(wanted)):
        raise JournalError(
            f"journal {folder} lies in {folder.resolve()} and not in {wanted}; give key 'broker.journal_dir' as it "
            "was, or move the journal there and make the former a link to it"
        )
    return folder
