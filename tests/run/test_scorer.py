"""Scoring as a role of its own, in real processes: a killed scorer costs its verdicts a repetition, and no token."""

from april.broker.events import ChunkAccepted, Leased, LeaseEnded, SampleScored
from april.broker.journal import Journal
from tests.run.processes import APRIL, Job, assert_closed, wait_until

PATIENT = """
import pathlib, time

FOLDER = pathlib.Path(__file__).parent

def verdict(response, label, finish_reason):
    (FOLDER / "scoring").touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.01)
    return float(response.endswith(label)), {"waited": 1.0}
"""


def test_a_scorer_killed_in_the_middle_of_scoring_costs_no_token(config_file, tmp_path, monkeypatch):
    """What it held is scored by its successor; no response is generated again, and the run comes to its end."""
    (tmp_path / "patient.py").write_text(PATIENT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:.")
    scored = ["--reward.where", "scorer", "--reward.name", "patient:verdict", "--reward.timeout_s", "600"]
    job = Job([*APRIL, "run", str(config_file), *scored], tmp_path / "output")
    try:
        wait_until((tmp_path / "scoring").exists, job)
        job.kill("--name scorer-0")
        (tmp_path / "go").touch()
        assert job.wait() == 0, job.output
        wait_until(lambda: job.descendants() == [])
    finally:
        job.end()
    assert "scorer-0 ended with status -9; restart 1 of 3" in job.output
    summary = assert_closed(tmp_path / "runs" / "small")
    assert summary["state"] == "finished" and summary["steps"] == 3
    assert summary["tokens"]["refused"] == summary["tokens"]["emitted_unacked"] == 0
    lost = lost_while_scored(tmp_path / "runs" / "small")
    assert lost and all("scorer scorer-0 was lost" in error for error in lost)


def lost_while_scored(run_dir):
    """Errors of the leases that ended without a score; a complete response is leased for nothing but its score."""
    complete, samples, errors = set(), {}, []
    journal = Journal(run_dir / "journal")
    for event, _ in journal.replay():
        match event:
            case Leased():
                sample = (event.group, event.index)
                assert event.scoring == (sample in complete)
                samples[event.token] = sample
            case ChunkAccepted():
                assert samples[event.token] not in complete
                assert event.lease_over == bool(event.finish_reason)
                if event.finish_reason:
                    complete.add(samples[event.token])
            case SampleScored():
                assert samples[event.token] in complete
            case LeaseEnded(cause="lost") if samples[event.token] in complete:
                errors.append(event.error)
    journal.close()
    return errors
