"""A response in turns is the same wherever it is interrupted, and whether worker, broker or both die."""

import pytest

from tests.support.marks import full

ALONE = ("--schedule.rollout_batch_size", "1", "--schedule.over_sampling_batch_size", "1", "--evaluation.prompts", "1")


def finish(run):
    """Run until the first group is consumed; returns the facts of its two samples."""
    run.until(lambda: run.ledger.steps.next == 1)
    group = run.ledger.deliveries[0][0]
    assert run.ledger.account.closed
    sampled = sum(sample.sampled_tokens for sample in group.samples)
    assert sampled == group.tokens < sum(sample.length for sample in group.samples)
    return [run.facts(sample) for sample in group.samples]


@pytest.fixture
def uncut(make_run):
    """Facts of the group's samples without interruption."""
    undisturbed = make_run(*ALONE, "--run.name", "undisturbed")
    undisturbed.start_worker()
    return finish(undisturbed)


def test_turns_and_observations_alternate_until_the_environment_is_done(uncut):
    assert {facts["finish_reason"] for facts in uncut} <= {"stop", "length"}
    assert any(len(facts["observations"]) > 2 for facts in uncut)
    for facts in uncut:
        assert 0 < facts["reward"] < 1
        for start, end in facts["observations"]:
            assert facts["logprobs"][start:end] == [0] * (end - start)


def cut_after(run, passes, how):
    """Run so many passes of the worker, then interrupt as `how` says, and let a successor continue.

    Returns at which moments of their turns the samples were interrupted, or {"complete"}.
    """
    run.start_worker()
    for _ in range(passes):
        run.run_pass()
        if run.ledger.steps.next == 1:
            return {"complete"}
    cut = [lease.sample for lease in run.ledger.leases.values() if lease.generating and lease.sample.length]
    asked = {call.key for _, call in run.worker.environment_turns.pool.waiting}
    before = {(sample.group.id, sample.index): (sample.length, sample.observations) for sample in cut}
    moments = {moment(sample, asked) for sample in cut}
    if how == "leave":
        run.worker._leave()
    if how == "kill both":
        run.talk.restart_broker()
    if how == "kill broker":
        run.kill_broker()
    else:
        run.kill_worker()
        run.talk.tick(11.0)
        run.start_worker()
    after = {(group, index): run.ledger.groups[group].samples[index] for group, index in before}
    assert before == {key: (sample.length, sample.observations) for key, sample in after.items()}
    return moments


def moment(sample, asked):
    if sample.lease_id in asked:
        return "asked"
    observed = sample.observations
    return "next turn" if observed and observed[-1][1] == sample.length else "in a turn"


@pytest.mark.full
@pytest.mark.parametrize("how", [full("leave"), "kill worker", full("kill broker"), "kill both"])
def test_a_sample_interrupted_at_any_token_resumes_as_if_uninterrupted(make_run, uncut, how):
    """Interrupted after every token: within a turn, while the environment answers, and when the next turn starts."""
    passes, moments = 1, set()
    while "complete" not in moments:
        broken = make_run(*ALONE, "--run.name", f"cut-{passes}")
        moments |= cut_after(broken, passes, how)
        assert finish(broken) == uncut
        broken.talk.journal.close()
        passes += 1
    assert {"in a turn", "asked", "next turn"} <= moments


def test_a_sample_interrupted_many_times_resumes_as_if_uninterrupted(make_run, uncut):
    """Every worker makes only five passes: decode steps, or waiting for an answer."""
    broken = make_run(*ALONE, "--run.name", "again")
    broken.start_worker()
    for index in range(1000):
        if broken.ledger.steps.next == 1:
            break
        broken.run_pass()
        if index % 5 == 4:
            broken.worker._leave()
            broken.kill_worker()
            if index % 2:
                broken.talk.restart_broker()
            broken.talk.tick(11.0)
            broken.start_worker()
    assert finish(broken) == uncut
