"""Teachers of agents' sessions in the broker: the reward said stands, and each fork's column comes from a scorer."""

import numpy as np
import pytest

from april import wire
from april.broker.journal.snapshot import freeze, thaw
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import GroupState, SampleState
from april.learner.source import decode_groups
from tests.support.broker_conversation import AGENTS, FakeAgents, FakeLearner, FakeScorer, FakeWorker, joined


@pytest.fixture
def run(converse, config_file, policy_folder):
    """Factory of brokers with agents and a teacher that scorers ask: run(*overrides)."""
    with config_file.open("a") as file:
        file.write(f'\n[teacher.big]\npath = "{policy_folder}"\n')
    return lambda *overrides: converse(*AGENTS, "--reward.where", "scorer", *overrides)


def sample_of(talk, told):
    return talk.ledger.groups[told.group].samples[told.index]


def training_sessions(agents):
    return [told for told in agents.listen() if not told.evaluation]


def in_two_forks(agents, worker, told):
    """A session of a turn of 4 tokens after 3, and a fork that goes on after it: 3 tokens after 1."""
    agents.say_to_policy(told.lease_id, 0, 3)
    (grant,) = worker.grants()
    worker.chunk(grant, 3, 4, "stop")
    agents.say_to_policy(told.lease_id + 1, 7, 1)
    (grant,) = worker.grants()
    worker.chunk(grant, 8, 3, "stop")


def of_teacher(scorer, grant, *columns, reward=0.0):
    """Answer a grant with a column for each fork."""
    counts = [{"big": len(column)} for column in columns]
    values = np.array([value for column in columns for value in column], np.float32)
    rewards = [reward] * (len(grant.group_scored) or 1)
    scorer.say(wire.Report([wire.TokenScored(grant.lease_id, rewards, [{}] * len(rewards), columns=counts)]), [values])


def columns_by_fork(batch, arrays):
    groups = decode_groups(batch.groups, [np.array(array) for array in arrays], batch.token_scores)
    return {(s.group, s.index, s.fork): (s.reward, s.token_scores) for _, group in groups for s in group}


def test_a_said_reward_stands_and_each_fork_has_its_column_though_broker_and_scorer_die(run):
    talk = run()
    agents, worker = joined(FakeAgents(talk), 1000), joined(FakeWorker(talk), capacity=1000)
    told = training_sessions(agents)[0]
    in_two_forks(agents, worker, told)
    agents.score(told, 0.5, correct=1.0)
    assert agents.answers("done") == [told.lease_id], "the agent's part is over"
    assert talk.ledger.groups[told.group].state is GroupState.OPEN
    thawed = Ledger(talk.ledger.rules)
    thaw(freeze(talk.ledger), thawed)
    assert freeze(thawed) == freeze(talk.ledger) and thawed.queue.has_scoring
    talk.restart_broker()
    scorer = joined(FakeScorer(talk))
    (grant,) = scorer.grants()
    assert (grant.teacher, grant.rewarded, grant.forks) == ("big", True, [3, 8])
    whole = talk.service.payloads.response_ids
    assert [array.tobytes() for array in grant.arrays[-2:]] == [
        bytes(whole(fork).data) for fork in sample_of(talk, told).with_forks
    ]
    scorer.give_back(grant, 0, "scoring_failed", "teacher 'big': gone")
    assert (sample_of(talk, told).attempts, sample_of(talk, told).reward) == (1, 0.5)
    (grant,) = scorer.grants()
    of_teacher(scorer, grant, [-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0, -7.0])
    assert scorer.answers("done")[-1] == grant.lease_id
    talk.restart_broker()
    agents, worker = joined(FakeAgents(talk), 1000), joined(FakeWorker(talk), capacity=1000)
    scorer, learner = joined(FakeScorer(talk)), joined(FakeLearner(talk))
    for other in training_sessions(agents):
        if talk.ledger.steps.next:
            break
        agents.say_to_policy(other.lease_id, 0, 3)
        for grant in worker.grants():
            worker.chunk(grant, 3, 4, "stop")
        agents.score(other, 0.25)
        for grant in scorer.grants():
            of_teacher(scorer, grant, [-8.0] * 4)
    found = columns_by_fork(*learner.fetch(0))
    mine = {fork: found.pop((told.group, told.index, fork)) for fork in (0, 1)}
    assert [reward for reward, _ in mine.values()] == [0.5, 0.5]
    assert mine[0][1]["big"].tolist() == [-1.0, -2.0, -3.0, -4.0] and mine[1][1]["big"].tolist() == [-5.0, -6.0, -7.0]
    assert found and all(scores["big"].tolist() == [-8.0] * 4 for _, scores in found.values())
    assert all(reward == 0.25 for reward, _ in found.values()) and talk.ledger.account.closed


def test_a_session_whose_teacher_fails_for_good_is_a_dead_letter_without_its_reward(run):
    talk = run("--broker.attempts", "2", "--schedule.min_group_size", "1")
    agents, worker, scorer = joined(FakeAgents(talk)), joined(FakeWorker(talk)), joined(FakeScorer(talk))
    told = training_sessions(agents)[0]
    in_two_forks(agents, worker, told)
    agents.score(told, 0.5)
    for _ in range(2):
        (grant,) = scorer.grants()
        scorer.give_back(grant, 0, "scoring_failed", "teacher 'big': gone")
    sample = sample_of(talk, told)
    assert (sample.state, sample.reward) == (SampleState.DEAD, None)
    (letter,) = talk.ledger.dead_letters.letters
    assert letter.error == "teacher 'big': gone" and talk.ledger.account.closed


def test_sessions_that_are_scored_together_have_their_columns_fork_by_fork(run):
    talk = run("--reward.name", "group:tests.workers.x:y")
    agents, worker = joined(FakeAgents(talk), 1000), joined(FakeWorker(talk), capacity=1000)
    scorer, told = joined(FakeScorer(talk)), training_sessions(agents)
    first, second = (one for one in told if one.group == told[0].group)
    in_two_forks(agents, worker, first)
    agents.score(first, 0.5)
    agents.say_to_policy(second.lease_id, 0, 3)
    (turn,) = worker.grants()
    worker.chunk(turn, 3, 4, "stop")
    agents.score(second, 0.5)
    (grant,) = scorer.grants()
    assert (grant.rewarded, grant.forks, len(grant.group_scored)) == (False, [3, 8, 3], 2)
    of_teacher(scorer, grant, [-1.0] * 4, [-2.0] * 3, [-3.0] * 4, reward=1.0)
    forks = [fork for one in (first, second) for fork in sample_of(talk, one).with_forks]
    found = [np.frombuffer(talk.service.payloads.token_scores(fork)["big"], "f4").tolist() for fork in forks]
    assert found == [[-1.0] * 4, [-2.0] * 3, [-3.0] * 4]
    assert [sample_of(talk, one).reward for one in (first, second)] == [1.0, 1.0]


@pytest.mark.parametrize(
    "columns",
    [[[-1.0] * 4], [[-1.0] * 4, [-1.0] * 11], [[-1.0] * 7, [-1.0] * 3], [[-1.0] * 4, [-1.0]]],
    ids=["of one fork of two", "of its prefix too", "of the agent's words too", "of its turns"],
)
def test_columns_that_do_not_fit_the_forks_are_refused(run, columns):
    talk = run()
    agents, worker, scorer = joined(FakeAgents(talk)), joined(FakeWorker(talk)), joined(FakeScorer(talk))
    told = training_sessions(agents)[0]
    in_two_forks(agents, worker, told)
    agents.score(told, 0.5)
    (grant,) = scorer.grants()
    of_teacher(scorer, grant, *columns)
    ((lease_id, reason),) = scorer.answers("rejects")
    assert lease_id == grant.lease_id and reason.startswith("bad score: ")
    assert sample_of(talk, told).state is SampleState.SCORING
    of_teacher(scorer, grant, [-1.0] * 4, [-2.0] * 3)
    assert scorer.answers("done") == [grant.lease_id]


def test_an_agent_tells_no_token_scores_and_held_out_sessions_have_no_teacher(run):
    talk = run()
    agents, worker, scorer = joined(FakeAgents(talk)), joined(FakeWorker(talk)), joined(FakeScorer(talk))
    held_out = next(told for told in agents.listen() if told.evaluation)
    judged, told = sample_of(talk, held_out), training_sessions(agents)[0]
    for one in (held_out, told):
        agents.say_to_policy(one.lease_id, 0, 3)
        (grant,) = worker.grants()
        worker.chunk(grant, 3, 4, "stop")
    scored = wire.TokenScored(told.lease_id, [1.0], [{}], columns=[{"big": 4}])
    agents.say(wire.Report([scored]), [np.zeros(4, np.float32)])
    ((_, reason),) = agents.answers("rejects")
    assert reason.startswith("bad score: token scores are for")
    agents.score(held_out, 1.0)
    assert judged.reward == 1.0 and scorer.grants() == []
