"""A run of three steps whose first two are trained a second time, after a kill of broker and learner."""

from collections.abc import Sequence
from pathlib import Path

from tests.support.run_processes import Job, assert_closed, steps_recorded, wait_until


def assert_trained_again_bit_by_bit(job: Job, run_dir: Path, gate, columns: Sequence[str]) -> None:
    """Kill both once two steps are trained and the `gate` holds the third; the samples of the two, by these `columns`,
    are written again as they were. The run has no checkpoint by then."""
    from pyarrow import parquet

    def samples() -> list:
        return [parquet.read_table(file, columns=columns).to_pylist() for file in files]

    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and steps_recorded(run_dir) >= 2, job)
    files = [run_dir / f"samples/step_00000{step}.parquet" for step in (1, 2)]
    wait_until(lambda: all(file.exists() for file in files), job)
    before, written = samples(), [file.stat().st_mtime_ns for file in files]
    job.kill("april.cli broker")
    job.kill("april.learner.launch")
    gate.open()
    assert job.wait() == 0, job.output
    summary = assert_closed(run_dir)
    assert summary["steps"] == 3 and summary["starts"] == {"broker": 2, "learner": 2}
    assert summary["replays"]["different"] == 0 and summary["replays"]["same"] >= 2
    assert all(file.stat().st_mtime_ns > old for file, old in zip(files, written, strict=True)), "trained again"
    assert samples() == before
