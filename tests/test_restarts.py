"""Budgets of restarts: a fault of a minute ends no run, one that stays does, and whoever works gets his whole budget
again. The supervisor is the real one, on a clock of the test's own, over parts that need no process."""

import pytest

from april.config import load
from april.launch import supervisor
from april.launch.supervisor import RunFailed, Supervisor
from april.processes import clock, restarts
from april.processes.lifetime import STEPPED_ASIDE

FAULT_S = 60.0


class Notes:
    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


class Programs:
    """A target and its only program: alive, or ended with a status, as the test says."""

    def __init__(self):
        self.ended, self.starts = None, 0

    def start(self, name, command, environment, log):
        self.starts += 1
        log.write_text("its last line\n")
        return self

    def status(self):
        return self.ended

    def wait(self, _):
        return self.ended

    def kill(self): ...


@pytest.fixture
def watched(config_file, monkeypatch):
    """`watched(name)`: a supervisor, one of its parts, and what that runs as; `watched.now` is the time."""
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


def status(step=0, tokens_per_s=0.0):
    worker = {"name": "worker-0", "tokens_per_s": tokens_per_s}
    return {"step": step, "workers": [worker], "scorers": [], "agents": [], "learner_silent_s": None}


def tend(run, part, programs, now, dies_until, seconds=600.0, with_status=1):
    """Look after it every second; it dies as soon as it is started, up to that time."""
    part.start()
    end = now[0] + seconds
    while now[0] < end:
        programs.ended = with_status if now[0] < dies_until and part.start_at is None else None
        run._tend(part)
        now[0] += 1.0


@pytest.mark.parametrize("name", ["broker", "worker-0", "learner"])
def test_a_fault_of_a_minute_ends_no_run(watched, name):
    run, part, programs = watched(name)
    tend(run, part, programs, watched.now, dies_until=watched.now[0] + FAULT_S)
    assert part.status is None and 0 < part.restarts <= part.max_restarts


@pytest.mark.parametrize("name", ["broker", "worker-0", "learner"])
def test_a_fault_that_stays_ends_it_with_the_part_s_last_lines(watched, name):
    run, part, programs = watched(name)
    began = watched.now[0]
    with pytest.raises(RunFailed, match=r"(restart|restarts) brought nothing.*\n.*its last line"):
        tend(run, part, programs, watched.now, dies_until=began + 600.0)
    assert programs.starts == 1 + part.max_restarts


def test_the_first_restart_is_at_once_and_no_delay_is_longer_than_the_last(watched):
    for most in (1, 2, 3, 5, 20, 5000):
        delays = [restarts.delay_s(number, most) for number in range(1, most + 1)]
        assert delays[0] == 0.0 and delays == sorted(delays)
        assert most == 1 or delays[-1] == restarts.LONGEST_DELAY_S


def test_a_worker_that_works_for_a_while_has_its_whole_budget_again_though_no_step_is_trained(watched):
    run, part, _ = watched("worker-0")
    part.start()
    for seconds, left in ((1.0, 2), (restarts.STEADY_S, 0)):
        part.restarts = 2
        run._note_alive(status(tokens_per_s=5.0))
        watched.now[0] += seconds
        run._note_alive(status(tokens_per_s=5.0))
        assert part.restarts == left
    part.restarts = 2
    part.start()
    run._note_alive(status(tokens_per_s=5.0))
    assert part.restarts == 2, "what it did before it died counts for nothing"


def test_an_idle_worker_gets_no_budget_back_by_waiting(watched):
    run, part, _ = watched("worker-0")
    part.start()
    part.restarts = 2
    for _ in range(3):
        run._note_alive(status())
        watched.now[0] += restarts.STEADY_S
    assert part.restarts == 2


def test_a_drained_broker_may_be_stopped_as_often_as_its_operator_likes(watched):
    run, part, programs = watched("broker")
    tend(run, part, programs, watched.now, dies_until=watched.now[0] + 40.0, with_status=STEPPED_ASIDE)
    assert part.restarts == 0 and programs.starts > 1 + part.max_restarts
    assert part.status is None and supervisor.STEPPED_ASIDE not in supervisor.HOPELESS
