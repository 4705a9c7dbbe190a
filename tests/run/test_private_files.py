"""A run's folder is its user's alone: prompts, responses, secrets of the configuration, and locks."""

import os

import pytest

from april.broker.journal.journal import Journal

OTHERS = 0o077


@pytest.fixture(autouse=True)
def usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.full
def test_all_that_a_run_writes_is_private(start_run, run_dir):
    job = start_run("--schedule.max_steps", "2", "--learner.checkpoint_every", "1")
    assert job.wait() == 0, job.output
    names = ("config.toml", "journal", "samples", "logs", "metrics.jsonl", "report.html", "checkpoints")
    for path in (run_dir, *(run_dir / name for name in names), *run_dir.glob("[jls]*/**/*")):
        assert not path.stat().st_mode & OTHERS, path


def test_others_cannot_hold_the_lock_of_a_journal(tmp_path):
    """Nor that of one whose lock file an earlier version has left open to them."""
    for folder in (tmp_path / "new", tmp_path / "old"):
        if folder.name == "old":
            folder.mkdir()
            (folder / "lock").touch(0o666)
        Journal(folder).close()
        assert not (folder / "lock").stat().st_mode & OTHERS and not folder.stat().st_mode & OTHERS
