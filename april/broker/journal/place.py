"""Location of a run's journal: in the run's folder, or on another disk with a symbolic link in the run's folder."""

import os
from pathlib import Path

from april.broker.journal.files import JournalError
from april.files.disk import sync


def journal_folder(run_dir: Path) -> Path:
    """The journal's folder of a run, which need not exist yet. Raises JournalError if its disk is not mounted."""
    folder = run_dir / "journal"
    if folder.is_symlink() and not folder.is_dir():
        raise JournalError(f"journal {folder} lies in {folder.readlink()}, which is not here; mount that disk")
    return folder


def locate_journal(run_dir: Path, journal_dir: Path | None) -> Path:
    """The journal's folder of a run; a new journal is begun in a subfolder of `journal_dir`, if given.

    Raises JournalError if an existing journal lies elsewhere or the subfolder is in use, and OSError.
    """
    folder = journal_folder(run_dir)
    if journal_dir is None:
        return folder
    wanted = journal_dir / run_dir.name
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
