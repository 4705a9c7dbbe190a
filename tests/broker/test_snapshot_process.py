"""Snapshots are made by a helper process: the broker never waits for it, and killing either at any time loses
nothing."""

import random
import shutil
import time
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from april import config as configuration
from april.broker.journal.files import JournalError, file_path, file_starts
from april.broker.journal.journal import Journal
from april.broker.journal.snapshot import SnapshotStore, freeze
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.snapshots import DEADLINE_S, POLL_S, HelperProcess, Snapshots, make_snapshot
from april.broker.telemetry.sample_history import SampleHistory
from tests.support.filling_journal import SETTINGS, Run
from tests.support.ledger_steps import write_steps

RULES = Rules(batch_groups=2, group_size=2, max_staleness=3)
LIMIT_S = 60.0


@pytest.fixture
def run(config_file):
    return Run(configuration.load(config_file, [*SETTINGS, "--evaluation.prompts", "1"]))


class Written:
    """A journal of a ledger and its sample history, with the image of both at the start of every journal file."""

    def __init__(self, folder, chance, files):
        self.folder, self.images = folder, {}
        with closing(Journal(folder, file_records=100)) as journal:
            ledger = Ledger(RULES, write=journal.append)
            history = SampleHistory(ledger)
            ledger.start_learner(0)
            while len(self.images) < files:
                write_steps(ledger, history, chance, steps=1)
                if journal.file_full:
                    self.images[journal.rotate()] = bytes(freeze(ledger, history.freeze()))

    def snapshots(self):
        return {position: bytes(image) for position, image in SnapshotStore(self.folder).newest_first()}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), data=st.data())
def test_a_snapshot_equals_the_ledger_at_its_position_whatever_was_made_or_broken_before(tmp_path, seed, data):
    """A snapshot is made from any undamaged earlier one and the journal files after it, never from a damaged one."""
    folder = tmp_path / "journal"
    shutil.rmtree(folder, ignore_errors=True)
    written = Written(folder, random.Random(seed), files=4)
    for position in written.images:
        if data.draw(st.booleans(), "make"):
            for _ in make_snapshot(folder, position, RULES):
                pass
        whole = written.snapshots()
        assert all(image == written.images[at] for at, image in whole.items())
        assert len(whole) <= 2 and (not whole or file_starts(folder)[-1] >= max(whole))
        if len(whole) == 2 and data.draw(st.booleans(), "break"):
            path = folder / f"{max(whole):020d}.snapshot"
            path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size - 1))])


def test_no_snapshot_is_made_from_a_missing_short_or_damaged_file(tmp_path):
    written = Written(tmp_path, random.Random(0), files=3)
    first, second, third = written.images
    path, whole = file_path(tmp_path, first), file_path(tmp_path, first).read_bytes()
    for broken in (None, b"", whole[:-1], whole[:50] + b"\xff" + whole[51:]):
        path.unlink(missing_ok=True)
        if broken is not None:
            path.write_bytes(broken)
        with pytest.raises(JournalError, match=r"lacks the file|is damaged"):
            next(make_snapshot(tmp_path, third, RULES))
    assert not written.snapshots()
    path.write_bytes(whole)
    list(make_snapshot(tmp_path, second, RULES))
    assert written.snapshots() == {second: written.images[second]}


def finish(snapshots, position, release_files):
    """Poll the helper process until the snapshot at `position` exists."""
    deadline = time.monotonic() + LIMIT_S
    while snapshots.busy or max(snapshots.store.positions(), default=0) < position:
        assert time.monotonic() < deadline
        snapshots.follow(position, release_files, time.monotonic())
        time.sleep(POLL_S / 10)


def test_the_process_deletes_files_only_after_the_broker_has_closed_them(tmp_path):
    written = Written(tmp_path, random.Random(1), files=4)
    snapshots, released = Snapshots(tmp_path, RULES), []
    for position in written.images:
        finish(
            snapshots,
            position,
            lambda dead: released.append([start for start in dead if start in file_starts(tmp_path)]),
        )
    *_, older, newest = written.images
    assert written.snapshots() == {older: written.images[older], newest: written.images[newest]}
    gone = {start for dead in released for start in dead}
    assert gone and not gone & set(file_starts(tmp_path)) and snapshots.failures == 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_a_process_killed_anywhere_leaves_a_state_from_which_another_goes_on(tmp_path, seed):
    chance = random.Random(seed)
    written = Written(tmp_path, chance, files=4)
    for position in written.images:
        helper = HelperProcess(tmp_path, position, RULES)
        time.sleep(chance.uniform(0.1, 0.5))
        if helper.dead_files() is not None:
            helper.confirm_closed()
            time.sleep(chance.uniform(0, 0.02))
        helper.close()
        assert all(image == written.images[at] for at, image in written.snapshots().items())
        snapshots = Snapshots(tmp_path, RULES)
        finish(snapshots, position, lambda dead: None)
        assert written.snapshots()[position] == written.images[position]
        assert not list(tmp_path.glob("*.partial"))


def test_a_half_written_file_is_not_taken_for_a_snapshot(tmp_path, monkeypatch):
    written = Written(tmp_path, random.Random(2), files=2)
    first, second = written.images
    list(make_snapshot(tmp_path, first, RULES))
    before = written.snapshots()

    def power_cut(*arguments):
        raise KeyboardInterrupt

    for where in ("os.fdatasync", "pathlib.Path.rename"):
        with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
            dying.setattr(where, power_cut)
            list(make_snapshot(tmp_path, second, RULES))
        assert written.snapshots() == before and len(list(tmp_path.glob("*.partial"))) == 1
    list(make_snapshot(tmp_path, second, RULES))
    assert written.snapshots() == before | {second: written.images[second]} and not list(tmp_path.glob("*.partial"))


class Stuck:
    killed = False

    def dead_files(self):
        return None

    def confirm_closed(self):
        raise AssertionError("it has named no files")

    def status(self):
        return -9 if self.killed else None

    def kill(self):
        self.killed = True

    close = kill


def test_a_hanging_process_is_killed_counted_and_retried_with_growing_delay(tmp_path):
    started = []

    def start(*arguments):
        started.append(now)
        return Stuck()

    now, snapshots = 0.0, Snapshots(tmp_path, RULES, start)
    while not snapshots.processes_failed:
        snapshots.follow(1, lambda dead: None, now)
        now += 1.0
    assert snapshots.failures == 3
    first, second, third = started
    assert second - first >= DEADLINE_S and third - second >= DEADLINE_S + 30
    snapshots.follow(1, lambda dead: None, now + 1000)
    assert len(started) == 3, "then the broker makes it"


def fill_file(run):
    while not run.journal.file_full:
        run.ledger.start_drain()
        run.ledger.end_drain()


def test_after_an_unreadable_file_the_broker_writes_the_snapshot_from_memory_at_the_next_rotation(run):
    run.train(segments=1)
    fill_file(run)
    damaged = file_path(run.journal.folder, run.journal.file_start)
    run.service.end_file()
    damaged.write_bytes(b"\xff" + damaged.read_bytes()[1:])
    run.tick(POLL_S)
    run.tick(POLL_S)
    snapshots = run.service.snapshots
    assert snapshots.processes_failed and snapshots.failures == 1 and run.snapshots()[-1] < run.journal.file_start
    fill_file(run)
    run.take_snapshot()
    assert run.snapshots()[-1] == run.journal.file_start and not snapshots.processes_failed
    account = run.ledger.account.summary()
    run.restart_broker()
    assert run.ledger.account.summary() == account


def test_a_broker_that_died_before_its_snapshot_has_it_made_after_its_start(run):
    run.service.snapshots.start = lambda *arguments: Stuck()
    fill_file(run)
    run.service.end_file()
    run.tick(POLL_S)
    assert not run.snapshots()
    run.restart_broker()
    run.take_snapshot()
    assert run.snapshots() == [run.journal.file_start]
