"""What a worker does with answers of an environment that are long, late, missing or the last."""

import msgspec
import pytest

from april.broker.ledger.samples import SampleState

ONE = ("--schedule.rollout_batch_size", "1", "--schedule.over_sampling_batch_size", "1", "--evaluation.prompts", "1")


def game(name):
    return ("--environment.name", f"tests.environments.games:{name}", "--run.name", name)


def first_samples(table):
    """Those of the first group, once they are complete."""
    table.until(lambda: table.ledger.next_step == 1)
    return table.ledger.deliveries[0][0].samples


def test_one_that_is_done_without_a_word_ends_the_response_with_the_end_of_text(table):
    table = table(*ONE, *game("over"), "--reward.name", "f1")
    table.start_worker()
    for sample in first_samples(table):
        (observation,) = sample.observations
        assert observation == (sample.length - 1, sample.length) and sample.finish_reason == "stop"
        assert table.story(sample)["ids"][-1] == table.worker.tokenizer.end_of_text


@pytest.mark.parametrize(("most", "budget"), [(5, 48), (512, 20)])
def test_a_long_answer_is_cut_to_what_is_permitted_and_to_the_budget(table, most, budget):
    keys = ("--environment.max_observation_tokens", str(most), "--sampling.max_response_tokens", str(budget))
    table = table(*ONE, *game("endless"), *keys, "--reward.name", "f1")
    table.start_worker()
    for sample in first_samples(table):
        assert sample.length <= budget and sample.observations
        lengths = [end - start for start, end in sample.observations]
        assert all(length == most for length in lengths[:-1]) and max(lengths) <= most
        assert sample.finish_reason == ("length" if sample.length == budget else "stop")


def test_a_failure_gives_the_sample_back_and_after_some_attempts_it_is_dead_with_the_reason(table):
    table = table(*ONE, *game("fail"))
    table.start_worker()
    table.until(lambda: table.ledger.dead_letters.total)
    letter = table.ledger.dead_letters.letters[0]
    assert "games:fail': RuntimeError: no such tool" in letter.error and letter.attempts == 5
    assert table.talk.service.recorder.environment["failed"] >= 5
    assert table.ledger.closed, "what was sampled before is counted as discarded"


def test_a_failure_can_be_an_observation_instead(table):
    table = table(*ONE, *game("fail"), "--environment.failure_text", "error", "--reward.name", "f1")
    table.start_worker()
    error = table.worker.tokenizer.encode_prompt("error").tolist()
    seen = 0
    for sample in first_samples(table):
        assert sample.state is SampleState.DONE and sample.attempts == 0
        for start, end in sample.observations:
            assert table.story(sample)["ids"][start:end] == error[: end - start]
            seen += 1
    assert table.talk.service.recorder.environment["failed"] >= seen > 0


def test_an_answer_for_a_sample_that_was_handed_back_comes_too_late(table):
    table = table(*ONE)
    table.start_worker()
    table.until(lambda: table.worker.turns.pending)
    worker, asked = table.worker, [call.key for _, call in table.worker.turns.pool.waiting]
    for lease_id in asked:
        worker._give_back(lease_id, "leave")
    table.until(lambda: not worker.turns.pending)
    assert not set(asked) & set(table.ledger.leases)
    for sample in first_samples(table):
        state = msgspec.msgpack.decode(table.talk.service.payloads.environment_state(sample))
        numbers = [int(said.split(":")[0]) for said in state["said"]]
        assert numbers == list(range(len(sample.observations))), "each turn once, in order"


def test_the_per_turn_budget_cuts_a_turn_and_the_environment_is_told(table):
    table = table(*ONE, "--environment.turn_ends", "[]", "--environment.max_turn_tokens", "4")
    table.start_worker()
    first_samples(table)
    assert {call.complete for call in table.worker.turns.pool.asked} == {False}
    assert all(len(call.text) <= 4 for call in table.worker.turns.pool.asked)
