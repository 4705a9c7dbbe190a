"""A run that one April has begun and the next one goes on with, or refuses with a sentence."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import april
from april.util.versions import FILE, JOURNAL
from tests.support.run_processes import APRIL, assert_closed, steps_recorded, wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
NEXT = "0.3.0"
ENDLESS = ("--learner.ranks", "1", "--schedule.max_steps", "100000")


@pytest.fixture
def next_april(tmp_path):
    """next_april(*replacements) -> words that call this April under the next number, with such (file, old, new)"""
    source = tmp_path / "next" / "april"
    shutil.copytree(Path(april.__file__).parent, source, ignore=shutil.ignore_patterns("__pycache__"))

    def change(*replacements):
        for file, old, new in (("version.py", april.__version__, NEXT), *replacements):
            text = (source / file).read_text()
            assert old in text
            (source / file).write_text(text.replace(old, new))
        where = source.parent
        return ["env", f"--chdir={where}", f"PYTHONPATH={where}", sys.executable, "-m", "april.cli"]

    return change


@pytest.fixture
def drained(start, config_file, run_dir):
    """The folder of a run that was drained and stopped in the middle by this April."""
    job = start("first", [*APRIL, "run", str(config_file), *ENDLESS])
    wait_until(lambda: steps_recorded(run_dir) >= 2, job)
    subprocess.run([*APRIL, "drain", str(run_dir)], check=True)
    job.process.terminate()
    job.wait()
    return run_dir


def test_the_next_april_goes_on_with_a_drained_run(start, config_file, drained, next_april):
    stamps = [(drained / FILE).read_bytes(), (drained / "journal" / FILE).read_bytes()]
    following, last = next_april(), steps_recorded(drained) + 3
    job = start(
        "second", [*following, "run", str(config_file), "--resume", *ENDLESS, "--schedule.max_steps", str(last)]
    )
    end = [*following, "drain", str(drained), "--end"]
    wait_until(lambda: subprocess.run(end, capture_output=True).returncode == 0, job)
    assert job.wait() == 0, job.output
    found = assert_closed(drained)
    assert found["steps"] == last and found["state"] == "finished" and found["replays"]["different"] == 0
    assert stamps == [(drained / FILE).read_bytes(), (drained / "journal" / FILE).read_bytes()], "who began it"


def test_an_april_with_another_journal_says_which_one_finishes_the_run(config_file, drained, next_april):
    now = JOURNAL.current
    table = '"journal", {{1: "0.1", {}}})'
    both = table.format(f'{now}: "0.2"'), table.format(f'{now}: "0.2", {now + 1}: "0.3"')
    following = next_april(("util/versions.py", *both))
    done = subprocess.run([*following, "run", str(config_file), "--resume", *ENDLESS], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"by April 0.2 (format {now}," in done.stderr
    assert "Traceback" not in done.stderr and assert_closed(drained)["steps"] >= 2
