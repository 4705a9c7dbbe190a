"""A long run's disk space stays bounded: files that neither a restart nor a learner needs are deleted."""

import pytest

from april import config as configuration
from april.broker.journal.files import JournalError
from tests.support.broker_conversation import FakeLearner
from tests.support.filling_journal import SETTINGS, Run


@pytest.fixture
def run(config_file):
    return Run(configuration.load(config_file, [*SETTINGS, "--evaluation.prompts", "1"]))


def test_files_before_the_older_snapshot_are_deleted_once_everything_in_them_is_trained(run):
    run.train(segments=5)
    assert len(run.segments()) <= 3 and len(run.snapshots()) == 2
    assert int(run.segments()[0].stem) <= run.snapshots()[0]


def test_a_file_is_kept_while_the_learner_may_need_a_record_in_it(run, monkeypatch):
    monkeypatch.setattr(FakeLearner, "durable", lambda *_: None)
    run.train(segments=4)
    assert len(run.segments()) > 4 and int(run.segments()[0].stem) == 0


def test_a_snapshot_that_cannot_be_written_costs_neither_space_nor_the_restart(run):
    run.train(segments=2)
    snapshots = run.snapshots()
    in_the_way = run.journal.folder / "7.partial"
    in_the_way.mkdir()
    run.train(segments=2)
    assert run.snapshots() == snapshots
    assert int(run.segments()[0].stem) >= snapshots[0], "what lies below both was given back all the same"
    assert run.metrics()["april_snapshots_failed_total"][()] > 0
    account, step = run.ledger.account.summary(), run.ledger.steps.consumed
    run.restart_broker()
    assert run.ledger.account.summary() == account
    run.join(step)
    in_the_way.rmdir()
    run.train(segments=4)
    assert len(run.segments()) <= 3 and snapshots[-1] < run.snapshots()[0]


def test_without_a_whole_snapshot_a_journal_that_was_reclaimed_is_refused(run):
    run.train(segments=4)
    for path in run.journal.folder.glob("*.snapshot"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalError, match="file at 0"):
        run.restart_broker()
    run.journal.close()
