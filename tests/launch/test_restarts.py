"""Restart budgets: a fault of a minute does not end a run, a permanent one does, and a working part gets it back.

The real supervisor runs on a fake clock, over parts without processes.
"""

import pytest

from april.config import load
from april.launch import supervisor
from april.launch.supervisor import RunFailed, Supervisor
from april.util import clock, lifetime
from april.util.lifetime import STEPPED_ASIDE

FAULT_S = 60.0


class Notes:
    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


class Programs:
    """A launch target and its only program, whose exit status the test sets."""

    def __init__(self):
        self.ended, self.starts = None, 0

    def start(self, name, command, environment, log):
        self.starts += 1
        with log.open("a") as written:
            written.write("its last line\n")
        return self

    def status(self):
        return self.ended

    def wait(self, _):
        return self.ended

    def kill(self): ...


@pytest.fixture
def watched(config_file, monkeypatch):
    """`watched(name)`: (supervisor, one of its parts, that part's program); `watched.now` is the time."""
    now = [1000.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])
    programs = Programs()
    run = Supervisor(load([config_file]), Notes())
    run.target = programs
    run.logs.mkdir(parents=True)
    run.broker = run._part("broker", [], run.config.broker)
    run.learner, worker = run._learner_part("config", "address"), run._worker_part(0, "config", "address")
    run.workers = [worker]
    monkeypatch.setattr(run, "_stop_run", lambda *_: None)
    monkeypatch.setattr(run, "_poll_status", lambda: now.__setitem__(0, now[0] + 1.0))
    parts = {part.name: part for part in (run.broker, run.learner, worker)}

    def of(name):
        return run, parts[name], programs

    of.now = now
    return of


def status(step=0, tokens_per_s=0.0, **fields):
    worker = {"name": "worker-0", "tokens_per_s": tokens_per_s}
    shown = {"step": step, "workers": [worker], "scorers": [], "agents": [], "learner_silent_s": None, "read_only": ""}
    return shown | fields


def tend(run, part, programs, now, dies_until, seconds=600.0, with_status=1):
    """Supervise the part every second. Until `dies_until` it exits with `with_status` as soon as it is started."""
    part.start()
    end = now[0] + seconds
    while now[0] < end:
        programs.ended = with_status if now[0] < dies_until and part.restart_at is None else None
        run._restart_if_needed(part)
        now[0] += 1.0


@pytest.mark.parametrize("name", ["broker", "worker-0", "learner"])
def test_faults_for_a_minute_do_not_end_the_run(watched, name):
    run, part, programs = watched(name)
    tend(run, part, programs, watched.now, dies_until=watched.now[0] + FAULT_S)
    assert part.status is None and 0 < part.restarts <= part.max_restarts


@pytest.mark.parametrize("name", ["broker", "worker-0", "learner"])
def test_a_permanent_fault_ends_the_run_with_the_part_s_last_lines(watched, name):
    run, part, programs = watched(name)
    began = watched.now[0]
    with pytest.raises(RunFailed, match=r"restarts? did not help.*\n.*last"):
        tend(run, part, programs, watched.now, dies_until=began + 600.0)
    assert programs.starts == 1 + part.max_restarts


def test_the_cause_of_a_restart_is_said_once(watched):
    run, part, programs = watched("worker-0")
    with pytest.raises(RunFailed):
        tend(run, part, programs, watched.now, dies_until=watched.now[0] + 600.0)
    restarts = [said for said in run.view.said if "; restart" in said]
    assert restarts[0] == "worker-0 ended with status 1: its last line; restart 1 of 3"
    assert len(restarts) == part.max_restarts and not any("its last line" in said for said in restarts[1:])


def test_a_part_that_waits_for_its_restart_at_the_end_of_the_run_is_named_once(watched):
    run, part, programs = watched("worker-0")
    run.learner = None
    part.start()
    programs.ended = 1
    run._restart_if_needed(part)
    run._broker_ended()
    assert len([said for said in run.view.said if "ended with status" in said]) == 1


def test_the_first_restart_is_immediate_and_no_delay_exceeds_the_last(watched):
    for most in (1, 2, 3, 5, 20, 5000):
        delays = [lifetime.restart_delay_s(number, most) for number in range(1, most + 1)]
        assert delays[0] == 0.0 and delays == sorted(delays)
        assert most == 1 or delays[-1] == lifetime.LONGEST_RESTART_DELAY_S


def test_a_worker_that_works_for_a_while_gets_its_restarts_back_without_a_step(watched):
    run, part, _ = watched("worker-0")
    part.start()
    for seconds, restarts_used in ((1.0, 2), (lifetime.STEADY_S, 0)):
        part.restarts = 2
        run._note_liveness(status(tokens_per_s=5.0))
        watched.now[0] += seconds
        run._note_liveness(status(tokens_per_s=5.0))
        assert part.restarts == restarts_used
    part.restarts = 2
    part.start()
    run._note_liveness(status(tokens_per_s=5.0))
    assert part.restarts == 2, "work before the restart does not count"


def test_an_idle_worker_gets_no_restarts_back_by_waiting(watched):
    run, part, _ = watched("worker-0")
    part.start()
    part.restarts = 2
    for _ in range(3):
        run._note_liveness(status())
        watched.now[0] += lifetime.STEADY_S
    assert part.restarts == 2


def test_stops_of_a_drained_broker_use_up_no_restarts(watched):
    run, part, programs = watched("broker")
    tend(run, part, programs, watched.now, dies_until=watched.now[0] + 40.0, with_status=STEPPED_ASIDE)
    assert part.restarts == 0 and programs.starts > 1 + part.max_restarts
    assert part.status is None and supervisor.STEPPED_ASIDE not in supervisor.FATAL_STATUSES


def test_no_part_is_killed_or_given_up_while_the_broker_cannot_write(watched):
    """It lets nobody in meanwhile, so that a healthy learner that was started again is not heard of."""
    run, part, programs = watched("learner")
    run._start(part)
    programs.kill = lambda: pytest.fail("a healthy part is killed")
    run._note_disk("the disk is full")
    for _ in range(int(2 * max(part.hung_s, part.load_s))):
        watched.now[0] += 1.0
        run._note_liveness(status(learner_silent_s=watched.now[0] - 1000.0, read_only="the disk is full"))
        run._restart_if_needed(part)
    programs.kill = lambda: None
    tend(run, part, programs, watched.now, dies_until=watched.now[0] + 600.0, seconds=700.0)
    assert part.restarts > part.max_restarts and part.status is None


def test_a_part_that_has_worked_and_refuses_at_a_restart_is_started_again(watched):
    """A single call that fails may have made it refuse; at its first start a refusal ends the run at once."""
    run, part, programs = watched("worker-0")
    with pytest.raises(RunFailed, match="refuses to work"):
        tend(run, part, programs, watched.now, dies_until=watched.now[0] + 1.0, with_status=lifetime.REFUSED)
    part.start()
    watched.now[0] += supervisor.STALE_STATUS_S + 1.0
    part.note_heard(watched.now[0])
    tend(run, part, programs, watched.now, dies_until=watched.now[0] + 10.0, with_status=lifetime.REFUSED)
    assert part.status is None and 0 < part.restarts <= part.max_restarts
    with pytest.raises(RunFailed, match="did not help"):
        tend(run, part, programs, watched.now, dies_until=watched.now[0] + 600.0, with_status=lifetime.REFUSED)
