"""How a worker handles an environment's answers that are too long, late, missing, or the last."""

import msgspec
import pytest

from april.broker.ledger.samples import SampleState

ONE = ("--schedule.rollout_batch_size", "1", "--schedule.over_sampling_batch_size", "1", "--evaluation.prompts", "1")


def game(name):
    return ("--environment.name", f"tests.support.environments:{name}", "--run.name", name)


def first_samples(run):
    """Samples of the first group, once it is consumed."""
    run.until(lambda: run.ledger.steps.next == 1)
    return run.ledger.deliveries[0][0].samples


def test_an_empty_last_observation_ends_the_response_with_end_of_text(make_run):
    run = make_run(*ONE, *game("over"), "--reward.name", "f1")
    run.start_worker()
    for sample in first_samples(run):
        (observation,) = sample.observations
        assert observation == (sample.length - 1, sample.length) and sample.finish_reason == "stop"
        assert run.facts(sample)["ids"][-1] == run.worker.tokenizer.end_of_text


@pytest.mark.parametrize(("most", "budget"), [(5, 48), (512, 20)])
def test_a_long_observation_is_cut_to_its_limit_and_to_the_budget(make_run, most, budget):
    keys = ("--environment.max_observation_tokens", str(most), "--sampling.max_response_tokens", str(budget))
    run = make_run(*ONE, *game("endless"), *keys, "--reward.name", "f1")
    run.start_worker()
    for sample in first_samples(run):
        assert sample.length <= budget and sample.observations
        lengths = [end - start for start, end in sample.observations]
        assert all(length == most for length in lengths[:-1]) and max(lengths) <= most
        assert sample.finish_reason == ("length" if sample.length == budget else "stop")


def test_a_failure_gives_the_sample_back_until_it_is_a_dead_letter_with_the_reason(make_run):
    run = make_run(*ONE, *game("fail"))
    run.start_worker()
    run.until(lambda: run.ledger.dead_letters.total)
    letter = run.ledger.dead_letters.letters[0]
    assert "environments:fail': RuntimeError: no such tool" in letter.error and letter.attempts == 5
    assert run.talk.service.recorder.environment["failed"] >= 5
    assert run.ledger.account.closed, "what was sampled before is counted as discarded"


def test_a_failure_can_be_an_observation_instead(make_run):
    run = make_run(*ONE, *game("fail"), "--environment.failure_text", "error", "--reward.name", "f1")
    run.start_worker()
    error = run.worker.tokenizer.encode_prompt("error").tolist()
    seen = 0
    for sample in first_samples(run):
        assert sample.state is SampleState.DONE and sample.attempts == 0
        for start, end in sample.observations:
            assert run.facts(sample)["ids"][start:end] == error[: end - start]
            seen += 1
    assert run.talk.service.recorder.environment["failed"] >= seen > 0


def test_an_answer_for_a_sample_already_given_back_is_ignored(make_run):
    run = make_run(*ONE)
    run.start_worker()
    run.until(lambda: run.worker.environment_turns.pending)
    worker, asked = run.worker, [call.key for _, call in run.worker.environment_turns.pool.waiting]
    for lease_id in asked:
        worker._give_back(lease_id, "leave")
    run.until(lambda: not worker.environment_turns.pending)
    assert not set(asked) & set(run.ledger.leases)
    for sample in first_samples(run):
        state = msgspec.msgpack.decode(run.talk.service.payloads.environment_state(sample))
        numbers = [int(said.split(":")[0]) for said in state["said"]]
        assert numbers == list(range(len(sample.observations))), "each turn once, in order"


@pytest.mark.parametrize("keeps", [True, False])
def test_the_per_turn_budget_cuts_a_turn_and_the_environment_is_told(make_run, keeps):
    special = ("--environment.keep_special_tokens", str(keeps).lower())
    run = make_run(*ONE, "--environment.turn_ends", "[]", "--environment.max_turn_tokens", "4", *special)
    run.start_worker()
    first_samples(run)
    assert {call.complete for call in run.worker.environment_turns.pool.asked} == {False}
    texts = [call.text for call in run.worker.environment_turns.pool.asked]
    assert all(len(text.replace("<pad>", " ")) <= 4 for text in texts)
    assert any("<pad>" in text for text in texts) == keeps, "random weights write it now and then"
