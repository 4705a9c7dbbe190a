"""`april trace`: the lengths that it finds in a journal are those that were created, not those that ended first."""

import pytest

from april.broker.journal.snapshot import SnapshotStore, freeze
from april.broker.ledger.ledger import Ledger, Rules
from april.cli import main
from april.config import ConfigError
from april.simulate.pipeline import Pipeline
from april.simulate.trace import TracedGroup, read_trace, record_trace
from april.wire.message import Version
from tests.support.simulated_scenarios import HARD, SCHEDULES, scenario
from tests.support.small_journals import add_group, recorded

BUDGET = 100
"""tokens that a response of `small_ledger` may have"""


def record_simulated(run_dir, schedule, **keys):
    """(the simulated run of which the folder has a journal, what is recorded of it, lengths of as many groups)."""
    pipeline = Pipeline(scenario(**SCHEDULES[schedule] | keys))
    with recorded(pipeline.ledger, run_dir):
        pipeline.run()
    found = record_trace(run_dir)
    created = [pipeline.lengths.of(group) for group in range(len(found.groups) + found.cut_short)]
    return pipeline, found, created


@pytest.mark.parametrize("schedule", ["sync", "april", "overlap", "continuous"])
def test_a_recording_has_the_lengths_of_the_created_groups(schedule, tmp_path):
    """The groups that are complete beside the unfinished ones would make the responses look shorter."""
    pipeline, found, created = record_simulated(tmp_path, schedule)
    assert [group.response_tokens for group in found.groups] == created
    assert not found.cut_short and not found.censored
    settled = pipeline.ledger.steps.consumed - pipeline.scenario.schedule.batches_in_reach
    assert len(created) >= settled * pipeline.ledger.rules.batch_groups


@pytest.mark.parametrize("circumstances", [{}, HARD], ids=["aborted", "dead"])
def test_groups_cut_short_by_discards_are_counted_and_reported(circumstances, tmp_path):
    schedule = "april" if circumstances else "dropped"
    keys = circumstances and circumstances | {"engines__failure_every_s": 3.0, "engines__chunk_tokens": 2000}
    pipeline, found, created = record_simulated(tmp_path, schedule, **keys)
    rest = iter(created)
    assert all(group.response_tokens in rest for group in found.groups), "the others are whole, and in order"
    assert 0 < found.cut_short <= pipeline.ledger.account.counts["dead_sample" if circumstances else "aborted"]
    assert f"{found.cut_short} of {len(created)} groups were discarded unfinished" in found.censored


def small_ledger():
    ledger = Ledger(Rules(batch_groups=4, group_size=2, max_staleness=5, max_response_tokens=BUDGET))
    ledger.start_learner(0)
    return ledger


def test_groups_after_an_unfinished_one_are_left_out_and_a_torn_tail_is_ignored(tmp_path):
    """Group 0 has a sample that was resumed; 1 is evaluation; 2 lacks a response; 3 is complete."""
    ledger = small_ledger()
    with recorded(ledger, tmp_path):
        group = add_group(ledger, [None, 5], prompt_tokens=11)
        ledger.add_chunk(group.samples[0].lease_id, 0, 2, Version(0, 0))
        ledger.end_lease(group.samples[0].lease_id, "abort")
        again = ledger.lease(group.samples[0], "w", 0, expires_at=1.0)
        ledger.add_chunk(again.id, 2, 38, Version(0, 0), "stop")
        for lengths, evaluation in [([9, 9], True), ([3, None], False), ([4, 4], False)]:
            add_group(ledger, lengths, evaluation=evaluation, size=2)
    (segment,) = (tmp_path / "journal").glob("*.msgpack")
    segment.write_bytes(segment.read_bytes() + b"\x93\xcf")
    assert record_trace(tmp_path).groups == [TracedGroup(11, [40, 5], BUDGET)], "it need not be scored"
    assert segment.read_bytes().endswith(b"\x93\xcf"), "nothing was touched"
    with pytest.raises(ConfigError, match="no journal"):
        record_trace(tmp_path / "journal")


def test_a_long_run_s_recording_begins_at_the_oldest_snapshot(tmp_path):
    """Journal files before the snapshot, with the groups that ended first, have been reclaimed."""
    ledger = small_ledger()
    with recorded(ledger, tmp_path) as journal:
        store = SnapshotStore(journal.folder)
        add_group(ledger, [None, 5])
        for first in (10, 20, 30):
            for length in range(first, first + 6):
                add_group(ledger, [length, length])
            if first < 30:
                store.write(journal.rotate(), freeze(ledger))
        *older, _ = sorted(journal.folder.glob("*.msgpack"))
        older[0].unlink()
    assert record_trace(tmp_path).groups == [TracedGroup(9, [n, n], BUDGET) for n in (*range(20, 26), *range(30, 36))]


def test_the_command_prints_what_it_wrote_and_what_is_missing(tmp_path, capsys):
    ledger = small_ledger()
    with recorded(ledger, tmp_path):
        add_group(ledger, [7, 8])
        ledger.discard(add_group(ledger, [3, None]), "aborted")
    out = tmp_path / "lengths.jsonl"
    assert main(["trace", str(tmp_path), "--out", str(out)]) == 0
    assert read_trace(out) == [TracedGroup(9, [7, 8], BUDGET)]
    printed = capsys.readouterr().out
    assert "1 groups, 2 responses, 15 tokens" in printed and "1 of 2 groups were discarded unfinished" in printed
    ledger = small_ledger()
    with recorded(ledger, tmp_path / "young"):
        add_group(ledger, [None, 8])
        add_group(ledger, [5, 5])
    assert main(["trace", str(tmp_path / "young"), "--out", str(out)]) == 2
    assert "let the run go on" in capsys.readouterr().err
    assert main(["trace", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "option '--out'" in capsys.readouterr().err
