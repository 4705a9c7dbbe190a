"""`april run` ends with the run's status, whether or not its report can be written."""

import errno

import pytest

from april import cli
from april.launch import preflight
from april.launch.supervisor import RunFailed, Supervisor
from april.observe.dashboard import report


def no_space(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(params=["damaged", "disk full", "report full"])
def obstacle(request, monkeypatch):
    """Prevents the report from being written; returns the expected message."""
    if request.param == "damaged":
        return "metrics.jsonl line 1 is not a JSON object with a step"
    monkeypatch.setattr(
        *(preflight, "mark_ended") if request.param == "disk full" else (report, "write_report"), no_space
    )
    return "No space left on device"


@pytest.mark.full
@pytest.mark.parametrize(("state", "status"), [("finished", 0), ("stopped", cli.INTERRUPTED), ("failed", 1)])
def test_a_report_that_cannot_be_written_is_one_line_and_keeps_the_run_s_status(
    obstacle, state, status, config_file, capsys, monkeypatch
):
    def run(supervisor):
        damaged = b"damaged\n" if "metrics" in obstacle else b""
        (supervisor.run_dir / "config.toml").write_text(supervisor.config.to_toml())
        (supervisor.run_dir / "metrics.jsonl").write_bytes(damaged + b'{"step": 1}\n')
        if state == "failed":
            raise RunFailed("broker ended with status 1")
        return state

    monkeypatch.setattr(Supervisor, "run", run)
    assert cli.main(["run", str(config_file)]) == status
    *failure, report = capsys.readouterr().err.splitlines()
    assert report.startswith("april run: no report: ") and obstacle in report
    assert failure == (["april run: broker ended with status 1"] if state == "failed" else [])
