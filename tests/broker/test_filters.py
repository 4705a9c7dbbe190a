"""Groups that give no gradient are discarded with a counted reason, and replaced within the same round."""

import orjson
import pytest

from april import config as configuration
from april import wire
from april.broker.filters import STATES, CompleteGroup, FilterFailed, GroupFilters, ask, zero_spread
from april.broker.journal.journal import Journal
from april.broker.ledger.samples import GroupState
from april.config import ConfigError, ScheduleSection
from april.observe.report.run_folder import read_records
from tests.support.broker_conversation import Conversation, FakeLearner, FakeWorker, joined


def group(*rewards, lengths=None):
    n = len(rewards)
    return CompleteGroup(list(rewards), lengths or [10] * n, ["stop"] * n, [{}] * n, list(rewards))


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((1.0, 1.0), "zero_spread"), ((0.0, 0.0, 0.0), "zero_spread"), ((0.0, 1.0), None), ((0.5,), "zero_spread")],
)
def test_equal_rewards_are_a_reason(rewards, reason):
    assert zero_spread(group(*rewards)) == reason


def test_rewards_that_differ_by_rounding_are_equal():
    assert zero_spread(group(0.1 + 0.2, 0.3)) == "zero_spread"


def test_no_reason_is_mistaken_for_a_state():
    assert set(GroupState) == STATES


@pytest.fixture
def own_filters(tmp_path, monkeypatch):
    (tmp_path / "own_filters.py").write_text(
        "def too_long(group): return 'too_long' if max(group.lengths) > 5 else None\n"
        "def broken(group): return group.no_such_field\n"
        "def unclear(group): return True\n"
        "def misleading(group): return 'ready'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def talk_to(config_file, *overrides):
    config = configuration.load(config_file, ["--no-data.shuffle", *overrides])
    talk = Conversation(config.model_copy(update={"data": config.data.model_copy(update={"eval_path": None})}))
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk), capacity=100)
    return talk, worker, learner


def in_order(grants):
    return sorted(grants, key=lambda grant: (grant.group, grant.index))


def complete_groups(worker, rewards):
    """Complete all groups that the worker has leased; `rewards(group, index)` gives the reward of a sample."""
    for grant in in_order(worker.grants()):
        worker.complete(grant, count=4, reward=rewards(grant.group, grant.index))


def test_groups_without_spread_are_replaced_while_the_round_runs(config_file):
    talk, worker, learner = talk_to(config_file, "--schedule.dynamic_sampling", "--over-sampling-batch-size", "4")
    worker_rewards = lambda group, index: float(index) if group % 2 else 1.0  # noqa: E731
    rounds = 0
    while learner.fetch(0) is None:
        complete_groups(worker, worker_rewards)
        rounds += 1
        assert rounds < 20
    batch = [group.id for group in talk.ledger.deliveries[0]]
    assert batch == [1, 3, 5, 7]
    assert talk.ledger.steps.next == 1, "all of it was one round"
    assert talk.ledger.account.counts["zero_spread"] == 4 and talk.ledger.account.discarded["zero_spread"] == 4 * 8
    assert talk.ledger.account.closed
    learner.consume(0)
    step = read_records(talk.config.run_dir / "metrics.jsonl")[0]
    assert step["discarded_groups"] == {"zero_spread": 4} and step["tokens_ledger"]["discarded"] == {"zero_spread": 32}
    summary = orjson.loads((talk.config.run_dir / "summary.json").read_bytes())
    assert summary["discarded_groups"] == {"zero_spread": 4} and summary["ledger_closed"] is True


def test_a_group_is_judged_by_what_is_right_in_it_and_not_by_penalties(config_file):
    """A filter compares `correct`, or without it the reward before penalties, as DAPO does: a group of wrong responses,
    one of them too long, is all wrong."""
    talk, worker, _ = talk_to(config_file, "--schedule.dynamic_sampling")
    grants = in_order(worker.grants())
    wrong, right, judged = grants[0:2], grants[2:4], grants[4:6]
    for grant, penalty in zip(wrong, (0.0, -1.0), strict=True):
        worker.complete(grant, reward=penalty, base=0.0, overlong=penalty)
    for grant, base in zip(right, (0.0, 1.0), strict=True):
        worker.complete(grant, reward=0.0, base=base, overlong=-base)
    for grant, reward in zip(judged, (0.3, 0.7), strict=True):
        worker.complete(grant, reward=reward, correct=1.0)
    assert talk.ledger.account.counts["zero_spread"] == 2
    assert talk.ledger.groups[right[0].group].state is GroupState.READY


def test_without_dynamic_sampling_groups_of_equal_rewards_are_trained(config_file):
    talk, worker, learner = talk_to(config_file)
    complete_groups(worker, lambda group, index: 1.0)
    assert learner.fetch(0) is not None and not talk.ledger.account.discarded


def test_a_filter_of_ones_own_is_counted_under_its_reason(config_file, own_filters):
    talk, worker, _ = talk_to(config_file, "--schedule.group_filter", "own_filters:too_long")
    first, second, *_ = in_order(worker.grants())
    worker.complete(first, count=4)
    worker.complete(second, count=6)
    assert talk.ledger.account.counts["too_long"] == 1 and talk.ledger.account.discarded["too_long"] == 10


def test_what_was_complete_when_the_broker_died_is_judged_by_its_successor(config_file):
    """The group became ready, and the broker died before it recorded the discard."""
    talk, worker, _ = talk_to(config_file, "--schedule.dynamic_sampling")
    grants = in_order(worker.grants())
    worker.complete(grants[0], reward=1.0)
    worker.chunk(grants[1], 0, 4, "stop")
    talk.ledger.score(grants[1].lease_id, 1.0)
    assert talk.ledger.groups[grants[0].group].state is GroupState.READY
    talk.restart_broker()
    talk.tick()
    assert talk.ledger.account.counts["zero_spread"] == 1 and grants[0].group not in talk.ledger.groups


def test_a_run_in_which_everything_is_filtered_fails_instead_of_going_on_for_ever(config_file):
    talk, worker, _ = talk_to(config_file, "--schedule.dynamic_sampling")
    for _ in range(100):
        complete_groups(worker, lambda group, index: 0.0)
        if talk.service.run.over:
            break
    assert talk.service.run.state == "failed"
    assert "120 groups in a row were filtered out, the last for zero_spread" in talk.service.run.over


@pytest.mark.parametrize("name", ["broken", "unclear", "misleading"])
def test_a_filter_that_fails_ends_the_run_and_discards_nothing(config_file, own_filters, name):
    talk, worker, _ = talk_to(config_file, "--schedule.group_filter", f"own_filters:{name}")
    complete_groups(worker, lambda group, index: float(index))
    assert talk.service.run.state == "failed" and name in talk.service.run.over
    assert not talk.ledger.account.discarded and worker.take(wire.Stop)


def test_a_filter_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"schedule\.group_filter"):
        GroupFilters(ScheduleSection(group_filter="no_such:filter"))
    with pytest.raises(FilterFailed, match="gone"):
        ask(lambda group: (_ for _ in ()).throw(RuntimeError("gone")), group(1.0))


def test_discarded_groups_are_in_the_journal(config_file):
    talk, worker, _ = talk_to(config_file, "--schedule.dynamic_sampling")
    complete_groups(worker, lambda group, index: 1.0)
    before = dict(talk.ledger.account.counts)
    talk.journal.close()
    journal = Journal(talk.config.run_dir / "journal")
    reasons = [event.reason for event, _ in journal.replay() if type(event).__name__ == "GroupDiscarded"]
    journal.close()
    assert reasons == ["zero_spread"] * before["zero_spread"] and len(reasons) == 6
