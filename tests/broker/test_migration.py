"""A straggler moves from a loaded worker to an idle one if it would end sooner there, also if a part dies meanwhile."""

import pytest

from april import wire
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.migration import PATIENCE_S, Migration, WorkerLoad
from april.wire.message import Version
from tests.support.broker_conversation import FakeWorker, joined, training

MIGRATE = ["--schedule.migrate", "--evaluation.prompts", "1"]


@pytest.fixture
def talk(converse):
    """A conversation whose rounds have 6 groups of 2 samples, of which 4 groups make a batch."""
    return converse(*MIGRATE)


@pytest.fixture
def busy(talk):
    """A worker that leased all samples of a round; the samples of 3 groups are still in its `unfinished`, each with 6
    tokens.

    Each token took 0.1 s for each running sample.
    """
    worker = joined(FakeWorker(talk), capacity=20)
    for grant in (grants := worker.grants()):
        if grant.evaluation:
            worker.complete(grant)
    grants = training(grants)
    assert len(grants) == 12
    for length in range(3):
        talk.now += 1.2
        worker.report([worker.new_tokens(grant, length, 1) for grant in grants])
    groups = sorted({grant.group for grant in grants})
    for grant in [grant for grant in grants if grant.group in groups[:3]]:
        worker.chunk(grant, 3, 1, "stop")
        worker.score(grant)
    worker.unfinished = [grant for grant in grants if grant.group in groups[3:]]
    for length in range(3, 6):
        talk.now += 0.6
        worker.report([worker.new_tokens(grant, length, 1) for grant in worker.unfinished])
    assert worker.take(wire.Cancel) == [], "there is nobody else"
    return worker


@pytest.fixture
def idle(talk, busy):
    worker = joined(FakeWorker(talk, "w1"))
    talk.tick(1.0)
    return worker


def recalled_grant(worker):
    """The grant that the broker has recalled from the worker."""
    [cancel] = [received.message for received in worker.take(wire.Cancel)]
    assert cancel.hand_back
    [lease_id] = cancel.lease_ids
    return next(grant for grant in worker.unfinished if grant.lease_id == lease_id)


def sample_of(grant):
    return grant.group, grant.index


def test_a_straggler_goes_on_at_the_idle_worker_after_its_last_tokens(talk, busy, idle):
    grant = recalled_grant(busy)
    busy.report([busy.new_tokens(grant, 6, 2)], [wire.GiveBack(grant.lease_id, 8, "recall")])
    [moved] = idle.grants()
    assert sample_of(moved) == sample_of(grant) and len(moved.arrays[1]) == 8
    busy.chunk(grant, 8, 1)
    assert "not current" in busy.answers("rejects")[-1][1], "its old holder is fenced"
    talk.now += 1.0
    idle.chunk(moved, 8, 2, "stop")
    idle.score(moved)
    sample = talk.ledger.groups[grant.group].samples[grant.index]
    assert (sample.length, sample.attempts, sample.reward) == (10, 0, 1.0)
    assert talk.service.recorder.moves == {"asked": 1, "done": 1} and talk.ledger.account.closed


def test_nothing_moves_with_migration_off(converse):
    talk = converse(*MIGRATE[1:])
    assert talk.service.workers.migration is None


def test_a_sample_that_ends_before_it_is_handed_back_does_not_move(talk, busy, idle):
    grant = recalled_grant(busy)
    busy.chunk(grant, 6, 1, "stop")
    busy.score(grant)
    assert talk.ledger.groups[grant.group].samples[grant.index].reward == 1.0
    assert idle.grants() == [] and not talk.service.workers.migration.moves and talk.ledger.account.closed


def test_a_worker_that_dies_during_a_move_costs_only_unacknowledged_tokens(talk, busy, idle):
    grant = recalled_grant(busy)
    talk.now += 11.0
    idle.say(wire.Heartbeat(), connection=b"control")
    found = {sample_of(grant): grant for grant in idle.grants()}
    assert found.keys() == {sample_of(grant) for grant in busy.unfinished}, "all that it held goes on elsewhere"
    assert len(found[sample_of(grant)].arrays[1]) == 6
    sample = talk.ledger.groups[grant.group].samples[grant.index]
    assert sample.attempts == 1 and not talk.service.workers.migration.moves and talk.ledger.account.closed


def test_if_the_target_is_gone_the_sample_is_handed_out_like_any_other(talk, busy, idle):
    grant = recalled_grant(busy)
    idle.say(wire.Goodbye())
    busy.give_back(grant, 6, "recall")
    [again] = busy.grants()
    assert sample_of(again) == sample_of(grant) and len(again.arrays[1]) == 6
    assert talk.service.recorder.moves == {"asked": 1} and talk.ledger.account.closed


def test_a_broker_killed_during_a_move_takes_the_sample_back_and_hands_it_out(talk, busy, idle):
    grant, leases = recalled_grant(busy), [grant.lease_id for grant in busy.unfinished]
    talk.restart_broker()
    for worker, held in ((busy, leases), (idle, [])):
        talk.peers[worker.name.encode()] = worker
        worker.join(leases=held, capacity=20)
    busy.give_back(grant, 6, "recall")
    [again] = [grant for worker in (busy, idle) for grant in training(worker.grants())]
    assert sample_of(again) == sample_of(grant) and len(again.arrays[1]) == 6
    sample = talk.ledger.groups[grant.group].samples[grant.index]
    assert sample.attempts == 0 and talk.ledger.account.closed


def test_a_sample_that_is_not_handed_back_in_time_does_not_move(talk, busy, idle):
    recalled_grant(busy)
    waiting = [grant.lease_id for grant in busy.unfinished]
    for _ in range(int(PATIENCE_S) + 1):
        talk.now += 1.0
        busy.say(wire.Heartbeat(waiting), connection=b"control")
        idle.say(wire.Heartbeat(), connection=b"control")
    assert [received.message.hand_back for received in busy.take(wire.Cancel)] == [True], "another is asked for"


# --- the rule alone -------------------------------------------------------------------------------------------


@pytest.fixture
def ledger():
    """A ledger with one open group of two samples: one with 100 tokens at worker a, one with 10 at worker b."""
    ledger = Ledger(Rules(1, 2, 0, max_response_tokens=1000))
    ledger.start_learner(0)
    ledger.start_round()
    group = ledger.open_group(0, 0, 0, prompt=bytes(4 * 20))
    for sample, worker, length in zip(group.samples, "ab", (100, 10), strict=True):
        ledger.add_chunk(ledger.lease(sample, worker, 0, 1e9).id, 0, length, Version(0, 0))
    return ledger


def moves(migration, ledger, *loads):
    return [(move.sample.index, move.target) for move in migration.choose(ledger, loads, 0.0)]


def paced(slope_s, context_s=1e-6):
    """A `Migration` that has observed decode steps of 10 ms plus `slope_s` for each running sequence."""
    migration = Migration()
    for running in (1, 4, 16):
        migration.observe_speed("a", running, 0.01 + slope_s * running)
    migration.observe_prefill(1000, 1000 * context_s)
    return migration


LOADED, IDLE = WorkerLoad("a", 16, False, 0), WorkerLoad("b", 1, True, 0)


@pytest.mark.parametrize(
    ("migration", "loads", "expected"),
    [
        (paced(0.001), (LOADED, IDLE), [(0, "b")]),
        (paced(0.0), (LOADED, IDLE), []),
        (paced(0.001, context_s=0.1), (LOADED, IDLE), []),
        (paced(0.001), (LOADED, WorkerLoad("b", 1, False, 0)), []),
        (paced(0.001), (WorkerLoad("a", 2, True, 0), IDLE), []),
        (paced(0.001), (LOADED,), []),
        (Migration(), (LOADED, IDLE), []),
    ],
    ids=["it pays", "no faster there", "prefill is dear", "no room", "as loaded", "nobody else", "nothing is known"],
)
def test_a_sample_moves_only_where_it_ends_sooner(ledger, migration, loads, expected):
    assert moves(migration, ledger, *loads) == expected


def test_a_straggler_moves_from_a_slow_to_a_fast_worker_of_equal_load(ledger):
    migration = Migration()
    for running in (1, 4, 16):
        migration.observe_speed("a", running, 0.03)
        migration.observe_speed("b", running, 0.01)
    migration.observe_prefill(1000, 0.001)
    assert moves(migration, ledger, WorkerLoad("a", 4, True, 0), WorkerLoad("b", 4, True, 0)) == [(0, "b")]


def test_a_sample_moves_once_and_never_to_older_weights(ledger):
    migration = paced(0.001)
    lease = ledger.leases[ledger.groups[0].samples[0].lease_id]
    migration.confirm(lease, 0.0)
    assert moves(migration, ledger, LOADED, IDLE) == []
    ledger.groups[0].opened_at = 1
    assert moves(paced(0.001), ledger, LOADED, IDLE) == []


def test_the_cost_of_moves_is_measured(ledger):
    migration = paced(0.001, context_s=1e-6)
    lease = ledger.leases[ledger.groups[0].samples[0].lease_id]
    for _ in range(50):
        migration.confirm(lease, 0.0)
        migration.observe_arrival(lease, 10, 1, 12.0)
    assert migration.prefill_s / migration.prefill_tokens == pytest.approx((12.0 - 10 * 0.011) / 110, rel=0.1)
