"""Agents' sessions in the broker: any worker may generate a turn, and a session holds no decode slot between its
turns."""

import msgspec
import pytest

from april import wire
from april.broker.ledger.samples import SampleState
from april.wire.message import Version
from april.wire.rows import CHUNK, OBSERVATION
from tests.support.broker_conversation import AGENTS, FakeAgents, FakeLearner, FakeWorker, joined


@pytest.fixture
def talk(converse):
    return converse(*AGENTS)


@pytest.fixture
def agents(talk):
    return joined(FakeAgents(talk))


@pytest.fixture
def told(agents):
    """An agent's session of a training sample, as the broker sent it to the agents process."""
    return next(told for told in agents.listen() if not told.evaluation)


def sample_of(talk, told):
    return talk.ledger.groups[told.group].samples[told.index]


def test_a_turn_is_generated_by_a_worker_and_forwarded_to_its_agent_once_on_disk(talk, worker, agents, told):
    assert worker.grants() == [], "nobody generates before an agent has spoken"
    agents.say_to_policy(told.lease_id, 0, 3)
    assert agents.answers("acks") == [(told.lease_id, 3)]
    (grant,) = worker.grants()
    assert (grant.turn_start, grant.max_new_tokens, grant.stop_token_ids, grant.hand_over) == (3, 8, [5], True)
    assert [array.tolist() for array in grant.arrays] == [[], [0, 1, 2]]
    worker.chunk(grant, 3, 2)
    worker.chunk(grant, 5, 2, "stop")
    assert worker.answers("done") == [grant.lease_id]
    assert sample_of(talk, told).state is SampleState.ACTING and talk.ledger.leases.generating == 0
    agents.listen()
    rows = [row for row, _ in agents.heard[told.lease_id]]
    assert [(row.start, row.tokens, row.kind, row.finish_reason) for row in rows] == [
        (3, 2, CHUNK, ""),
        (5, 2, CHUNK, "stop"),
    ]


def test_a_scored_session_goes_to_the_learner_without_the_turn_its_agent_never_got(talk, worker, agents, told):
    agents.say_to_policy(told.lease_id, 0, 3)
    (grant,) = worker.grants()
    worker.chunk(grant, 3, 4, "stop")
    agents.say_to_policy(told.lease_id, 7, 2)
    (grant,) = worker.grants()
    worker.chunk(grant, 9, 3)
    agents.score(told, 0.5)
    assert agents.answers("done") == [told.lease_id]
    sample = sample_of(talk, told)
    assert (sample.state, sample.length, sample.reward) == (SampleState.DONE, 7, 0.5)
    assert list(sample.segments) == [(3, 7, Version(0, 0))]
    assert talk.ledger.account.discarded["unread"] == 3 and talk.ledger.account.closed
    assert worker.take(wire.Cancel)[0].message.lease_ids == [grant.lease_id]
    assert len(talk.service.payloads.response_ids(sample).data) == 4 * 7


def test_sessions_of_a_lost_process_move_to_the_next_with_their_whole_history(talk, worker, agents, told):
    agents.say_to_policy(told.lease_id, 0, 3, key=b"first")
    (grant,) = worker.grants()
    worker.chunk(grant, 3, 4, "stop")
    agents.say_to_policy(told.lease_id, 7, 2, key=b"second")
    (grant,) = worker.grants()
    worker.chunk(grant, 9, 1)
    talk.now += talk.config.broker.session_timeout_s + 1
    worker.say(wire.Heartbeat([grant.lease_id]))
    talk.tick()
    assert sample_of(talk, told).agent_lease == 0
    other = joined(FakeAgents(talk, "a1"), capacity=100)
    again = next(one for one in other.listen() if (one.group, one.index) == (told.group, told.index))
    rows = [(row.kind, row.start, row.tokens, bool(row.finish)) for row, _ in other.heard[again.lease_id]]
    assert rows == [(OBSERVATION, 0, 3, False), (CHUNK, 3, 4, True), (OBSERVATION, 7, 2, False), (CHUNK, 9, 1, False)]
    states = [payload[4 * row.tokens :] for row, payload in other.heard[again.lease_id] if row.kind == OBSERVATION]
    assert [msgspec.msgpack.decode(state, type=wire.TurnRequest).key for state in states] == [b"first", b"second"]
    worker.chunk(grant, 10, 1, "stop")
    other.listen()
    assert other.heard[again.lease_id][-1][0].finish_reason == "stop", "the turn went on meanwhile"
    assert sample_of(talk, told).attempts == 0, "it had completed a turn"


def test_a_lost_session_that_may_not_be_replayed_is_a_counted_discard(converse):
    """A session whose agent has made no request yet is started anew, since nothing would be repeated."""
    talk = converse(*AGENTS, "--agent.replay", "discard")
    agents, worker, learner = FakeAgents(talk), FakeWorker(talk), FakeLearner(talk)
    agents.join(capacity=10)
    worker.join()
    learner.join()
    held = [one for one in agents.listen() if not one.evaluation]
    told, silent = held[0], next(one for one in held if one.group != held[0].group)
    agents.say_to_policy(told.lease_id, 0, 3)
    grant = next(grant for grant in worker.grants() if grant.group == told.group)
    worker.chunk(grant, 3, 4)
    agents.say(wire.Goodbye())
    assert not talk.ledger.account.discarded, "nobody has to run it again yet"
    other = joined(FakeAgents(talk, "a1"), capacity=1000)
    groups = {one.group for one in other.listen()}
    assert silent.group in groups and told.group not in groups
    ledger = talk.ledger
    assert (
        ledger.account.discarded == {"not_replayed": 4}
        and ledger.account.counts["not_replayed"] == 1
        and ledger.account.closed
    )
    assert not ledger.dead_letters.letters and not ledger.dead_letters.groups_in_a_row
    assert [lease for received in worker.take(wire.Cancel) for lease in received.message.lease_ids] == [grant.lease_id]


def test_turns_between_the_two_connections_of_an_agents_process_are_sent(talk, worker, agents, told):
    agents.say_to_policy(told.lease_id, 0, 3)
    (grant,) = worker.grants()
    again = FakeAgents(talk)
    assert again.arrive([told.lease_id]).lost_lease_ids == []
    worker.chunk(grant, 3, 4, "stop")
    again.listen()
    assert [(row.start, row.finish_reason) for row, _ in again.heard[told.lease_id]] == [(0, ""), (3, "stop")]


def test_the_broker_says_who_holds_a_session_and_whether_anybody_will(talk, worker, agents, told):
    other = joined(FakeAgents(talk, "a1"))

    def whose(lease_id, group=told.group, index=told.index):
        other.say(wire.HolderRequest(group, index, lease_id))
        [received] = other.take(wire.Holder)
        assert (received.message.group, received.message.index, received.message.lease_id) == (group, index, lease_id)
        return received.message.state, received.message.address

    assert whose(told.lease_id) == ("held", "")
    agents.say(wire.HolderCapacity(4, "http://here:1/v1"))
    assert whose(told.lease_id) == ("held", "http://here:1/v1")
    assert whose(told.lease_id + wire.MAX_FORKS) == ("moved", "")
    assert whose(told.lease_id, index=1000) == whose(told.lease_id, group=2**50) == ("over", "")
    agents.say_to_policy(told.lease_id, 0, 3)
    (grant,) = worker.grants()
    worker.chunk(grant, 3, 4, "stop")
    agents.say(wire.HolderCapacity(0, "http://here:1/v1"))
    agents.give_back(told, 0, "leave")
    assert whose(told.lease_id)[0] == "moved"
    agents.say(wire.HolderCapacity(1000))
    again = max(one.lease_id for one in agents.listen() if (one.group, one.index) == (told.group, told.index))
    agents.report(closings=[wire.Scored(again, [1.0], [{}])])
    assert whose(again) == ("over", "")


def test_a_failed_agent_starts_its_session_anew(talk, worker, agents, told):
    agents.say_to_policy(told.lease_id, 0, 3)
    (grant,) = worker.grants()
    worker.chunk(grant, 3, 4, "stop")
    agents.give_back(told, 0, "agent_failed", "ValueError: no")
    assert agents.answers("done") == [told.lease_id]
    sample = sample_of(talk, told)
    assert (sample.length, sample.attempts, sample.last_error) == (0, 1, "ValueError: no")
    assert talk.ledger.account.discarded["agent_failed"] == 4 and talk.ledger.account.closed


def test_an_agent_that_never_asked_has_failed(talk, agents, told):
    agents.report(closings=[wire.Closed(told.lease_id)])
    assert "before it had an answer" in sample_of(talk, told).last_error


def test_a_closed_session_waits_for_its_verifier(talk, worker, agents, told):
    agents.say_to_policy(told.lease_id, 0, 3)
    (grant,) = worker.grants()
    worker.chunk(grant, 3, 4, "stop")
    agents.report(closings=[wire.Closed(told.lease_id)])
    (grant,) = worker.grants()
    assert grant.scoring and grant.finish_reason == "stop"
    worker.score(grant, 1.0)
    assert sample_of(talk, told).state is SampleState.DONE


@pytest.mark.parametrize("count", [32, 40])
def test_a_turn_that_leaves_no_room_ends_its_session(talk, agents, told, count):
    agents.say_to_policy(told.lease_id, 0, count)
    ((lease_id, reason),) = agents.answers("rejects")
    assert lease_id == told.lease_id and "has no room" in reason
    assert (sample_of(talk, told).length, sample_of(talk, told).attempts) == (0, 1)


def test_a_group_reward_sees_the_state_that_each_agent_has_left(converse):
    """The states also reach the group reward after a restart of the broker, and whether or not an agent has given a
    reward itself."""
    talk = converse(*AGENTS, "--reward.name", "group:tests.workers.x:y")
    agents, worker = joined(FakeAgents(talk), capacity=1000), joined(FakeWorker(talk), capacity=1000)
    told = [one for one in agents.listen() if not one.evaluation]
    told = [one for one in told if one.group == told[0].group]
    for one in told:
        agents.say_to_policy(one.lease_id, 0, 3)
    for grant in worker.grants():
        worker.chunk(grant, 3, 4, "stop")
    states = [msgspec.msgpack.encode({"tests": one.index}) for one in told]
    first, second = (one.lease_id for one in told)
    agents.report(closings=[wire.Closed(first, [], bytes(5000))])
    assert agents.answers("rejects") == [(first, "bad closing: a state has at most 4096 bytes")]
    agents.report(closings=[wire.Closed(first, [], states[0])])
    talk.restart_broker()
    agents, worker = joined(FakeAgents(talk), 1000, [second]), joined(FakeWorker(talk), capacity=1000)
    agents.report(closings=[wire.Scored(second, [1.0], [{}], [], states[1])])
    (grant,) = [grant for grant in worker.grants() if grant.scoring]
    assert msgspec.msgpack.decode(grant.state) == states
    worker.report(closings=[wire.Scored(grant.lease_id, [0.0, 1.0], [{}, {}])])
    samples = [sample_of(talk, one) for one in told]
    assert [sample.reward for sample in samples] == [0.0, 1.0] and not any(sample.agent_state for sample in samples)


def test_after_the_last_batch_agents_keep_only_evaluation_sessions(converse):
    """Training sessions are cancelled: their requests would never be answered."""
    talk = converse(*AGENTS, "--schedule.max_steps", "1")
    agents, worker, learner = FakeAgents(talk), FakeWorker(talk), FakeLearner(talk)
    agents.join(capacity=1000)
    worker.join(capacity=1000)
    learner.join()
    told = {(one.group, one.index): one for one in agents.listen()}
    for one in told.values():
        agents.say_to_policy(one.lease_id, 0, 3)
    grants, batch = [grant for grant in worker.grants() if not told[grant.group, grant.index].evaluation], None
    for grant in grants:
        if batch is None:
            worker.chunk(grant, 3, 4, "stop")
            agents.score(told[grant.group, grant.index], 0.5)
            batch = learner.fetch(0)
    kept = {lease_id for received in agents.take(wire.Cancel) for lease_id in received.message.lease_ids}
    trained = {(group.group, head.index) for group in batch[0].groups for head in group.samples}
    assert kept == {one.lease_id for place, one in told.items() if not one.evaluation and place not in trained} != set()
    held = [lease.sample for lease in talk.ledger.leases.values() if lease.agent]
    assert held and all(sample.group.evaluation for sample in held) and talk.ledger.account.closed
    assert all(sample_of(talk, one).attempts == 0 for one in told.values())
    agents.listen()
    assert set(agents.sessions) == {one.lease_id for one in told.values()}, "none of them is given out again"


def test_a_drained_run_has_no_running_turn_and_its_sessions_stay(talk, worker, agents, told):
    agents.say_to_policy(told.lease_id, 0, 3)
    (grant,) = worker.grants()
    talk.ledger.start_drain()
    assert talk.status()["drain"] == "draining"
    worker.give_back(grant, 3, "abort")
    assert talk.status()["drain"] == "drained"
    assert sample_of(talk, told).agent_lease == told.lease_id


def test_a_held_out_session_keeps_its_version_between_its_turns(talk, worker, agents):
    held_out = next(told for told in agents.listen() if told.evaluation)
    assert worker.take(wire.Evaluating)[-1].message.steps == [0], "a session between two turns needs the version, too"
    agents.say_to_policy(held_out.lease_id, 0, 3)
    (grant,) = worker.grants()
    worker.chunk(grant, 3, 4, "stop")
    talk.ledger.steps.frontier = 1
    newer = joined(FakeWorker(talk, "w1"), 1)
    agents.say_to_policy(held_out.lease_id, 7, 2)
    assert newer.grants() == []
    (grant,) = worker.grants()
    worker.chunk(grant, 9, 4, "stop")
    agents.score(held_out, 0.5, correct=1.0)
    result = talk.ledger.evaluated[0]
    assert (result["versions"], result["accuracy"], result["reward"]) == ([[0, 0]], 1.0, 0.5)
