"""Processes of a run are killed for real: what must go on goes on, what must end ends, and nobody is orphaned."""

import os
import resource
import shlex
import signal
import time

import pytest

from tests.run.endless_loss import FILE
from tests.support.marks import full
from tests.support.run_processes import APRIL, assert_closed, steps_recorded, summary, wait_until

LAUNCHER = "april.learner.launch"
"""torchrun, which is the learner to the others"""
TWO_RANKS = ["--learner.ranks", "2"]
"""where the learner is what dies; elsewhere one starts sooner"""
HUNG_S = "20"
"""longer than a part takes to start on a busy machine"""


@pytest.fixture
def run(start_run):
    """Start `april run` on the small configuration with long responses, so that there is time to do harm, and without
    an end, unless it is given one."""
    longer = ["--sampling.max_response_tokens", "400", "--schedule.max_steps", "100000", "--learner.ranks", "1"]
    return lambda *overrides: start_run(*longer, *overrides)


def test_a_killed_worker_is_restarted_and_the_run_finishes(run, run_dir, gate):
    """Here with weights through shared memory; elsewhere they come over process groups."""
    job = run("--schedule.max_steps", "6", "--weights.transport", "shared_memory", *gate.hold(4))
    for step in (1, 3):
        wait_until(lambda step=step: steps_recorded(run_dir) >= step, job)
        job.kill("--name worker-0" if step == 1 else "--name worker-1")
    gate.open()
    assert job.wait() == 0, job.output
    assert job.restarts == ["restart 1 of 3"] * 2
    found = assert_closed(run_dir)
    assert found["steps"] == 6 and found["state"] == "finished"
    wait_until(lambda: job.descendants() == [])


@pytest.mark.full
def test_a_run_whose_broker_cannot_write_keeps_its_learner_and_ends_when_told(run, run_dir):
    """The learner waits for longer than the silence that it is allowed, and ends with a checkpoint of what it has
    trained."""
    job = run("--learner.hung_s", "5")
    wait_until(lambda: steps_recorded(run_dir) >= 1, job)
    ((broker, _),) = job.descendants("april.cli broker")
    size = sum(path.stat().st_size for path in (run_dir / "journal").glob("*.msgpack"))
    resource.prlimit(broker, resource.RLIMIT_FSIZE, (size, size))
    wait_until(lambda: "READ ONLY" in job.output, job)
    time.sleep(12.0)
    assert "has not been heard of" not in job.output and not job.restarts
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(60.0) == 130, job.output
    newest = max((run_dir / "checkpoints").glob("step_*"))
    assert int(newest.name.partition("_")[2]) >= steps_recorded(run_dir)
    wait_until(lambda: job.descendants() == [])


def test_a_worker_that_keeps_dying_ends_the_run(run, run_dir):
    job = run("--worker.max_restarts", "0")
    wait_until(lambda: steps_recorded(run_dir) >= 1, job)
    job.kill("--name worker-0")
    assert job.wait() == 1
    assert "worker-0 ended with status -9" in job.output
    assert_closed(run_dir)
    assert summary(run_dir)["state"] == "failed"
    wait_until(lambda: job.descendants() == [])


@pytest.mark.full
@pytest.mark.parametrize("victim", ["april.cli broker", full(LAUNCHER), "-u -m april.learner"])
def test_a_dead_broker_or_learner_is_restarted_and_the_others_continue(run, run_dir, gate, victim):
    """Workers keep their process and their tokens; a learner survives the broker, or continues from its checkpoint."""
    ranks = [] if "broker" in victim else TWO_RANKS
    job = run("--learner.checkpoint_every", "3", "--schedule.max_steps", "9", *ranks, *gate.hold(6))
    wait_until(lambda: steps_recorded(run_dir) >= 2, job)
    part, other = ("broker", "april.learner") if "broker" in victim else ("learner", "april.cli broker")
    survivors = job.descendants(other) + job.descendants("april.cli worker")
    job.kill(victim)
    wait_until(lambda: steps_recorded(run_dir) >= 4, job)
    assert survivors == job.descendants(other) + job.descendants("april.cli worker")
    gate.open()
    assert job.wait() == 0, job.output
    assert f"{part} ended with status" in job.output and "restart 1 of 5" in job.restarts
    found = assert_closed(run_dir)
    assert found["steps"] == 9 and found["state"] == "finished"
    assert found["starts"] == {"broker": 1 + (part == "broker"), "learner": 1 + (part == "learner")}
    assert found["replays"]["different"] == 0 and found["tokens"]["refused"] == 0
    wait_until(lambda: job.descendants() == [])


@pytest.mark.full
@pytest.mark.parametrize("victim", ["april.cli broker", LAUNCHER])
def test_a_broker_or_learner_that_keeps_dying_ends_the_run_with_its_last_lines(run, run_dir, victim):
    part = "broker" if "broker" in victim else "learner"
    job = run(f"--{part}.max_restarts", "0")
    wait_until(lambda: steps_recorded(run_dir) >= 1, job)
    job.kill(victim)
    assert job.wait() == 1
    assert summary(run_dir)["state"] == "failed"
    assert f"{part} ended with status" in job.output and f"  {part} | " in job.output
    wait_until(lambda: job.descendants() == [])


@pytest.mark.full
@pytest.mark.parametrize(
    "victims",
    [{"broker": "april.cli broker"}, full({"learner": "-u -m april.learner", "worker-0": "--name worker-0"})],
    ids=" and ".join,
)
@pytest.mark.timeout(900)
def test_hung_processes_are_killed_and_restarted(run, run_dir, tmp_path, monkeypatch, victims):
    """Processes that hang are stopped ones, or busy loops."""

    def log_of(name):
        return (run_dir / f"logs/{name}.log").read_text()

    endless = tmp_path / "endless"
    monkeypatch.setenv(FILE, str(endless))
    patience = [word for name in victims for word in (f"--{name.partition('-')[0]}.hung_s", HUNG_S)]
    job = run(*patience, *TWO_RANKS, "--algorithm.loss", "tests.run.endless_loss:loss")
    wait_until(lambda: steps_recorded(run_dir) >= 1, job)
    for victim in victims.values():
        os.kill(min(job.descendants(victim))[0], signal.SIGSTOP)
    for name in victims:
        wait_until(lambda name=name: f"{name} has not been heard of" in job.output, job)
    behind = steps_recorded(run_dir) + 1
    wait_until(lambda: steps_recorded(run_dir) > behind, job)
    if "learner" in victims:
        endless.touch()
        wait_until(
            lambda: "the main loop hangs: it has been at 'forward and backward' for 20 s" in log_of("learner"), job
        )
        behind = steps_recorded(run_dir)
        wait_until(lambda: steps_recorded(run_dir) > behind, job)
        assert "in loss" in log_of("learner"), "the log says where"
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.output
    assert_closed(run_dir)
    wait_until(lambda: job.descendants() == [])


def test_ctrl_c_stops_everything_and_keeps_acknowledged_tokens(run, run_dir):
    job = run()
    wait_until(lambda: steps_recorded(run_dir) >= 1, job)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.output
    wait_until(lambda: job.descendants() == [])
    found = assert_closed(run_dir)
    assert found["state"] == "stopped" and found["tokens"]["emitted_unacked"] == 0
    assert (run_dir / "checkpoints" / "policy" / "config.json").exists()


@pytest.mark.parametrize("after_s", [full(0.0), 1.0, full(4.0)])
def test_ctrl_c_during_the_start_ends_at_once(run, run_dir, after_s):
    job = run()
    wait_until(run_dir.exists, job)
    time.sleep(after_s)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.output
    wait_until(lambda: job.descendants() == [])


@pytest.mark.full
def test_a_run_whose_output_nobody_reads_any_more_is_stopped_as_it_should_be(start, config_file, run_dir):
    """With `| tee log`, Ctrl-C ends tee first."""
    words = shlex.join([*APRIL, "run", str(config_file), "--schedule.max_steps", "100000", "--learner.ranks", "1"])
    job = start("output", ["bash", "-c", f"{words} 2>&1 | head -n 1"])
    wait_until(lambda: steps_recorded(run_dir) >= 2, job)
    [pid] = [pid for pid, command in job.descendants("april.cli run") if not command.startswith("bash")]
    os.kill(pid, signal.SIGINT)
    wait_until(lambda: job.descendants("april.cli") == [])
    assert assert_closed(run_dir)["state"] == "stopped" and (run_dir / "checkpoints/policy").is_dir()


@pytest.mark.full
def test_ctrl_c_that_a_library_swallows_still_ends_the_run(run, config_file):
    """Many libraries have a bare `except` around what they import."""
    (config_file.parent / "swallows.py").write_text(
        "import os, signal, sys\n"
        "try:\n"
        "    if 'run' in sys.argv: os.kill(os.getpid(), signal.SIGINT)\n"
        "except BaseException: pass\n"
        "def grade(response, label): return 1.0\n"
    )
    job = run("--reward.name", "swallows:grade")
    assert job.wait() == 130, job.output


def test_no_process_survives_a_killed_supervisor(run, run_dir):
    job = run()
    wait_until(lambda: steps_recorded(run_dir) >= 1, job)
    job.process.kill()
    job.process.wait()
    wait_until(lambda: job.descendants() == [])


@pytest.mark.full
def test_a_worker_that_cannot_start_ends_the_run_with_its_last_lines(run, config_file):
    (config_file.parent / "broken.py").write_text(
        "from april.workers.engines.entry import EngineEntry\n\n\n"
        "class Engine(EngineEntry):\n"
        "    @classmethod\n"
        "    def from_config(cls, config, device, name):\n"
        '        raise RuntimeError("its driver is too old")\n'
    )
    job = run("--worker.engine", "broken:Engine", "--weights.canary", "false", "--worker.max_restarts", "1")
    assert job.wait() == 1
    assert "ended with status" in job.output and "its driver is too old" in job.output
    wait_until(lambda: job.descendants() == [])
