"""Whatever dies, whenever, however: what was acknowledged is there, nothing is trained twice, and the run ends well."""

import os
import random
import signal
import time

import pytest

from tests.chaos.chaos_run import BATCH_GROUPS, DELICATE, PATIENCE_S, Chaos
from tests.chaos.journal_history import History
from tests.chaos.session_history import SessionHistory
from tests.chaos.single_failures import SWEEPS, FailingRun
from tests.support.redrawn import redrawn
from tests.support.run_processes import steps_recorded, wait_until
from tests.support.small_run import PROMPTS

UNSYNCED_BYTES = 20_000
"""a good many chunks"""


@pytest.fixture
def chaos(tmp_path, policy_folder, data_folder):
    started = []

    def start(**options):
        started.append(Chaos(tmp_path, policy_folder, data_folder, **options))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_a_kill_of_each_part_and_a_dead_connection_cost_nothing_that_was_acknowledged(chaos):
    run = chaos()
    run.go_on()
    run.kill("broker", "abort")
    run.kill("worker", "generating")
    run.kill("learner", "training")
    run.half_open()
    run.finish()
    assert run.kills.total() == 3
    assert History(run.run_dir, PROMPTS).judge() == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_kills_of_all_parts_cost_nothing_that_was_acknowledged(chaos):
    run = chaos(tokens_between=200)
    run.go_on()
    for phase in DELICATE:
        run.kill("broker", phase, PATIENCE_S)
    for victim in random.sample(["broker", "worker", "learner"] * 3, 9):
        run.kill(victim, run.aim(victim))
    run.finish()
    print(run.table(), f"power losses that took bytes: {run.cuts()}", sep="\n")
    assert any(run.hits[phase] for phase in DELICATE)
    assert History(run.run_dir, PROMPTS).judge() == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_kills_under_agents_cost_nothing_that_was_said(chaos):
    run = chaos(tokens_between=100, agents=True)
    run.go_on()
    for victim in random.sample([*run.victims, *run.victims], 8):
        run.kill(victim, run.aim(victim))
    run.finish()
    history = SessionHistory(run.run_dir, PROMPTS)
    assert history.judge() == [] and history.judge_agents(run.read) == []
    print(run.table(), history.sessions_table(), sep="\n")
    assert history.discarded["agent_failed"], "programs have failed by themselves, too"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_sleep_and_dead_connections_cost_nothing_that_was_acknowledged(chaos):
    run = chaos(schedule="continuous")
    run.go_on()
    for victim, seconds in [("worker", 6.0), ("broker", 6.0), ("learner", 6.0)]:
        run.pause(victim, seconds)
        run.half_open()
        run.go_on()
    run.finish()
    assert History(run.run_dir, PROMPTS).judge() == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_full_disk_costs_nothing_that_was_acknowledged(chaos):
    """The broker falls silent, is killed meanwhile, and goes on by itself when there is room."""
    run = chaos()
    run.go_on()
    run.state.fill_disk(True)
    run.wait_for_log("broker", "nothing is acknowledged any more")
    run.kill("worker", "generating")
    run.kill("broker", "generating")
    run.state.fill_disk(False)
    run.go_on()
    run.state.fill_disk(True)
    run.wait_for_log("broker", "nothing is acknowledged any more", times=2)
    run.state.fill_disk(False)
    run.go_on()
    run.finish()
    assert History(run.run_dir, PROMPTS).judge() == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", SWEEPS)
def test_single_calls_that_fail_cost_nothing_and_stop_nothing(tmp_path, policy_folder, data_folder, part):
    """A slice of each part of the sweep of `benchmarks/faults.py`."""
    run = FailingRun(tmp_path, policy_folder, data_folder, SWEEPS[part])
    try:
        swept = run.sweep(calls=2, until=time.monotonic() + 180)
    finally:
        run.end()
    assert len(swept.failed) == 2 and swept.stuck == [] and swept.lost == [] and not swept.discarded


@pytest.mark.full
@pytest.mark.timeout(600)
def test_after_kills_a_sampler_has_drawn_what_the_journal_says_that_it_draws(chaos):
    """Each draw is made again from the seed and the events before it, as a broker that starts there would make it."""
    run = chaos(overrides=["--schedule.sampler", "difficulty"])
    run.go_on()
    for phase in ("abort", "generating", "training"):
        run.kill("broker", phase)
    run.kill("worker", "generating")
    wait_until(lambda: steps_recorded(run.run_dir) * BATCH_GROUPS > PROMPTS, run.job, PATIENCE_S)
    run.finish()
    wrongs = History(run.run_dir, PROMPTS).judge()
    assert [wrong for wrong in wrongs if not wrong.startswith("prompts are skipped")] == []
    drawn, again = redrawn(run.config, ["--schedule.sampler", "difficulty"])
    assert drawn == again and len(drawn) > PROMPTS
    assert sorted(drawn[:PROMPTS]) == list(range(PROMPTS)), "first each prompt once"


@pytest.mark.timeout(600)
def test_a_broker_that_does_not_sync_is_caught(chaos):
    """The negative control: the judge sees what a power loss takes from a broker that acknowledges too early."""
    run = chaos(sync=False)
    run.go_on()

    def is_far_behind():
        """If so, the broker is left standing: the disk must not catch up between this look and the end."""
        broker = run.process("broker")
        os.kill(broker, signal.SIGSTOP)
        if sum(size - safe for _, safe, size in run.state.reach()) > UNSYNCED_BYTES:
            return True
        os.kill(broker, signal.SIGCONT)
        return False

    wait_until(is_far_behind, run.job)
    run.end()
    run.state.lose_power(everything=True)
    history = History(run.run_dir, PROMPTS)
    history.judge_promises()
    assert any("acknowledged tokens are missing" in wrong for wrong in history.wrongs)
