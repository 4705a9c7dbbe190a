"""Stragglers move between the workers of a real run, while others are killed."""

import signal

import pytest

from april.broker.ledger.events import Leased, LeaseEnded, RowsAccepted
from april.observe.report.run_folder import read_records
from tests.support.journal_events import events
from tests.support.run_processes import assert_closed, steps_recorded, wait_until

COST = """
[cost]
decode_base_s = 1e-3
decode_running_s = 15e-3
decode_kv_s = 0.0
prefill_s = 1e-5
"""
"""A token takes a sequence that is alone a fourth of what it takes four."""
SETTINGS = ["--schedule.kind", "sync", "--over-sampling-batch-size", "4", "--schedule.migrate", "--learner.ranks", "1"]
LONG = ["--sampling.max_response_tokens", "200", "--schedule.max_steps", "1000", "--evaluation.every", "1000"]


def moved(run_dir):
    return sum(step["round"]["moved_samples"] for step in read_records(run_dir / "metrics.jsonl"))


@pytest.mark.full
def test_stragglers_move_to_the_worker_with_less_to_do_and_kills_cost_nothing(start_run, run_dir, tmp_path):
    (tmp_path / "cost.toml").write_text(COST)
    paced = ["--worker.engine", "paced", "--engine.pace", str(tmp_path / "cost.toml"), "--worker.report_s", "0.1"]
    job = start_run(*SETTINGS, *LONG, *paced)
    wait_until(lambda: steps_recorded(run_dir) and moved(run_dir), job)
    job.kill("--name worker-1")
    before = steps_recorded(run_dir)
    wait_until(lambda: steps_recorded(run_dir) > before + 1, job)
    job.kill("april.cli broker")
    before = steps_recorded(run_dir)
    wait_until(lambda: steps_recorded(run_dir) > before + 1, job)
    job.process.send_signal(signal.SIGINT)
    job.wait()
    assert_closed(run_dir)
    recalled, went_on = moves(run_dir)
    assert recalled and went_on, "none went on with another worker behind the tokens that it had"


def moves(run_dir):
    """Leases that were recalled, and those of them whose sample went to another worker next, and grew there."""
    holders, lengths, last, recalled, went_on = {}, {}, {}, {}, set()
    for event in events(run_dir):
        match event:
            case Leased():
                sample = (event.group, event.index)
                holders[event.lease_id] = sample, event.worker
                last[event.lease_id] = recalled.pop(sample, None)
            case RowsAccepted():
                for row in event.rows:
                    sample, worker = holders[row.lease_id]
                    before = last[row.lease_id]
                    if before and before[0] != worker and row.start == before[1] > 0:
                        went_on.add(row.lease_id)
                    lengths[sample] = row.start + row.tokens
            case LeaseEnded(cause="recall", lease_id=lease_id):
                sample, worker = holders[lease_id]
                recalled[sample] = worker, lengths[sample]
    return len([one for one in last.values() if one]) + len(recalled), went_on
