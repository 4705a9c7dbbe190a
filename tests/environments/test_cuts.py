"""A response in turns is the same wherever it was cut, and whoever died: worker, broker or both."""

import pytest

from tests.conftest import full

ALONE = ("--schedule.rollout_batch_size", "1", "--schedule.over_sampling_batch_size", "1", "--evaluation.prompts", "1")


def finish(table):
    """Both samples of the first group, to their end."""
    table.until(lambda: table.ledger.next_step == 1)
    group = table.ledger.deliveries[0][0]
    assert table.ledger.closed
    sampled = sum(sample.sampled for sample in group.samples)
    assert sampled == group.tokens < sum(sample.length for sample in group.samples)
    return [table.story(sample) for sample in group.samples]


@pytest.fixture
def uncut(table):
    """The group as it becomes when nothing happens."""
    undisturbed = table(*ALONE, "--run.name", "undisturbed")
    undisturbed.start_worker()
    return finish(undisturbed)


def test_turns_and_observations_alternate_until_the_environment_is_done(uncut):
    assert {story["finish_reason"] for story in uncut} <= {"stop", "length"}
    assert any(len(story["observations"]) > 2 for story in uncut)
    for story in uncut:
        assert 0 < story["reward"] < 1
        for start, end in story["observations"]:
            assert story["logprobs"][start:end] == [0] * (end - start)


def cut_after(table, turns, how):
    """Work for so many turns of the worker, then let somebody die or give up, and somebody else go on.

    Where the samples that were cut had come to.
    """
    table.start_worker()
    for _ in range(turns):
        table.turn()
        if table.ledger.next_step == 1:
            return {"complete"}
    cut = [lease.sample for lease in table.ledger.leases.values() if lease.generating and lease.sample.length]
    asked = {call.key for _, call in table.worker.turns.pool.waiting}
    before = {(sample.group.id, sample.index): (sample.length, sample.observations) for sample in cut}
    moments = {moment(sample, asked) for sample in cut}
    if how == "leave":
        table.worker._leave()
    if how == "kill both":
        table.talk.restart_broker()
    if how == "kill broker":
        table.kill_broker()
    else:
        table.kill_worker()
        table.talk.tick(11.0)
        table.start_worker()
    after = {(group, index): table.ledger.groups[group].samples[index] for group, index in before}
    assert before == {place: (sample.length, sample.observations) for place, sample in after.items()}
    return moments


def moment(sample, asked):
    if sample.lease_id in asked:
        return "asked"
    observed = sample.observations
    return "next turn" if observed and observed[-1][1] == sample.length else "in a turn"


@pytest.mark.parametrize("how", [full("leave"), "kill worker", full("kill broker"), "kill both"])
def test_cut_anywhere_it_goes_on_as_if_it_had_not_been(table, uncut, how):
    """In the midst of a turn, while the environment is asked, and at the start of the next: a cut after every token."""
    turns, moments = 1, set()
    while "complete" not in moments:
        broken = table(*ALONE, "--run.name", f"cut-{turns}")
        moments |= cut_after(broken, turns, how)
        assert finish(broken) == uncut
        broken.talk.journal.close()
        turns += 1
    assert {"in a turn", "asked", "next turn"} <= moments


def test_cut_again_and_again(table, uncut):
    """Every worker does one thing only: so many decode steps, or waiting for an answer."""
    broken = table(*ALONE, "--run.name", "again")
    broken.start_worker()
    for turn in range(1000):
        if broken.ledger.next_step == 1:
            break
        broken.turn()
        if turn % 5 == 4:
            broken.worker._leave()
            broken.kill_worker()
            if turn % 2:
                broken.talk.restart_broker()
            broken.talk.tick(11.0)
            broken.start_worker()
    assert finish(broken) == uncut
