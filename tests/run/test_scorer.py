"""Scoring as a role of its own, in real processes: a killed scorer costs its verdicts a repetition, and no token."""

import orjson
import pytest

from april.broker.ledger.events import GroupOpened, GroupScored, Leased, LeaseEnded, RowsAccepted, SampleScored
from april.observe.report.run_folder import read_records
from tests.support.journal_events import events
from tests.support.run_processes import assert_closed, wait_until

PATIENT = """
import pathlib, time

FOLDER = pathlib.Path(__file__).parent

def verdict(response, label, finish_reason):
    return float(response.endswith(label)), {"alone": 1.0}

def ranks(responses, label, finish_reasons):
    if responses[0] == ranks.example(label):
        return [1.0] * len(responses)        # before the run starts
    (FOLDER / "scoring").touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    return [(float(place), {"among": len(responses)}) for place in range(len(responses))]

ranks.example = "<{}>".format                # which the policy cannot say
"""


@pytest.mark.full
def test_a_scorer_killed_in_the_middle_of_scoring_costs_no_token(start_run, run_dir, tmp_path, monkeypatch):
    """What it held is scored by its successor; no response is generated again, and the run comes to its end."""
    (tmp_path / "patient.py").write_text(PATIENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:.")
    rows = [{"prompt": f"{row:02d}*3+60=", "label": str(row % 2)} for row in range(64)]
    for row in rows[::2]:
        row["reward"] = "group:patient:ranks"
    (tmp_path / "rows.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    scored = ["--data.path", str(tmp_path / "rows.jsonl"), "--reward.where", "scorer", "--reward.timeout_s", "600"]
    scored += ["--learner.ranks", "1"]
    job = start_run(*scored, "--reward.name", "patient:verdict", "--reward.allowed", '["group:patient:ranks"]')
    wait_until((tmp_path / "scoring").exists, job)
    job.kill("--name scorer-0")
    (tmp_path / "go").touch()
    assert job.wait() == 0, job.output
    wait_until(lambda: job.descendants() == [])
    assert "scorer-0 ended with status -9; restart 1 of 3" in job.output
    summary = assert_closed(run_dir)
    assert summary["state"] == "finished" and summary["steps"] == 3
    assert summary["tokens"]["refused"] == summary["tokens"]["emitted_unacked"] == 0
    history = ScoringHistory(run_dir)
    assert history.lost and all("scorer scorer-0 was lost" in error for error in history.lost.values())
    assert history.lost.keys() & history.together, "it was killed while it scored a group"
    assert history.scored["alone"] and history.scored["together"]
    last = read_records(run_dir / "metrics.jsonl")[-1]
    assert last["reward_details"].items() <= {"alone": 1.0, "among": 2.0, "over_limit": 0.0}.items()


class ScoringHistory:
    """The journal, read for who scored what; a response that is complete is leased for nothing but its score."""

    def __init__(self, run_dir):
        self.complete = set()
        """(group, index)"""
        self.together = set()
        """groups"""
        self.lost = {}
        """errors of leases that were lost while they scored, by group"""
        self.scored = {"alone": 0, "together": 0}
        self._samples = {}
        for event in events(run_dir):
            self.read(event)

    def read(self, event):
        match event:
            case GroupOpened(group_scored=True):
                self.together.add(event.group)
            case Leased():
                self._samples[event.lease_id] = sample = (event.group, event.index)
                assert event.scoring == (sample in self.complete)
                if event.scoring and event.group in self.together:
                    assert {(event.group, index) for index in (0, 1)} <= self.complete
            case RowsAccepted():
                for row in event.rows:
                    assert self._samples[row.lease_id] not in self.complete
                    assert row.ends_lease == bool(row.finish)
                    if row.finish:
                        self.complete.add(self._samples[row.lease_id])
            case SampleScored():
                assert self._samples[event.lease_id][0] not in self.together
                self.scored["alone"] += 1
            case GroupScored():
                assert event.rewards == [0.0, 1.0]
                self.scored["together"] += 1
            case LeaseEnded(cause="lost") if self._samples[event.lease_id] in self.complete:
                self.lost[self._samples[event.lease_id][0]] = event.error
