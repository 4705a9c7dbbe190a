"""The broker's answers to the learner without sockets: batches, trained steps and checkpoints."""

import gc
import math
import weakref

import numpy as np

from april import wire
from april.learner.source import decode_groups
from april.observe.report.run_folder import read_records
from april.wire.message import Version
from tests.support.broker_conversation import FakeLearner, FakeWorker, joined, make_batch


def test_n_complete_groups_make_a_batch_and_abort_the_rest(talk, worker, learner):
    aborted = make_batch(worker)
    abort = worker.take(wire.Abort)[-1].message
    assert all(grant.lease_id <= abort.watermark for grant in aborted)
    batch, arrays = learner.fetch(0)
    assert len(batch.groups) == 4 and all(len(group.samples) == 2 for group in batch.groups)
    expected = []
    for head in batch.groups:
        expected.append(head.prompt_tokens)
        expected += [sample.response_tokens for sample in head.samples for _ in ("ids", "logprobs")]
    assert [len(array) for array in arrays] == expected


def test_a_group_comes_with_its_prompt_under_a_hint(converse):
    talk = converse("--algorithm.divergence", "forward_kl", "--algorithm.hint", "{label}#{prompt}")
    worker, learner = joined(FakeWorker(talk)), joined(FakeLearner(talk))
    make_batch(worker)
    batch, arrays = learner.fetch(0)
    head, decode = batch.groups[0], talk.service.prompts.tokenizer.decode
    prompt, hinted = decode(np.array(arrays[0])), decode(np.frombuffer(head.hinted, "<i4"))
    assert hinted.endswith(f"#{prompt}") and len(hinted) > len(prompt) + 1
    [group] = decode_groups([head], [np.array(each) for each in arrays[:5]])
    assert all(sample.hinted_prompt.tobytes() == head.hinted for sample in group[1])


def test_the_same_step_gives_the_identical_batch(worker, learner):
    make_batch(worker)
    assert learner.fetch(0) == learner.fetch(0)


def test_a_batch_comes_in_parts_that_make_the_whole(worker, learner, monkeypatch):
    make_batch(worker)
    whole, arrays = learner.fetch(0)
    monkeypatch.setattr("april.broker.handlers.learner.PART_BYTES", 1)
    parts = learner.fetch_parts(0)
    assert [(part.message.first, part.message.total, len(part.message.groups)) for part in parts] == [
        (place, 4, 1) for place in range(4)
    ]
    assert [group for part in parts for group in part.message.groups] == whole.groups
    assert [array.tolist() for part in parts for array in part.arrays] == arrays


def test_a_learner_that_does_not_read_is_sent_no_more_than_its_credit(talk, worker, learner, monkeypatch):
    make_batch(worker)
    monkeypatch.setattr("april.broker.handlers.learner.PART_BYTES", 1)
    talk.service.context.credit_bytes = 1
    learner.say(wire.Fetch(0))
    for _ in range(10):
        talk.tick()
    [unread] = learner.take(wire.Batch)
    assert unread.message.first == 0, "one message may exceed the credit"
    learner.received_bytes = unread.array_bytes
    assert [part.message.first for part in learner.fetch_parts(0)][-1] == 3


def test_a_learner_from_an_older_checkpoint_gets_the_same_deliveries_again(talk, worker, learner):
    batches = []
    for step in range(2):
        make_batch(worker)
        worker.abort_all()
        batches.append(learner.fetch(step))
        learner.consume(step)
        if step == 0:
            worker.hold(1)
    again = FakeLearner(talk)
    started = again.join(step=0)
    assert (started.incarnation, started.frontier) == (1, 2)
    assert talk.ledger.account.tokens["trained"] == 0 and talk.ledger.account.closed
    for step, batch in enumerate(batches):
        assert again.fetch(step) == batch
        again.consume(step)
    assert talk.ledger.account.tokens["delivered"] == 0 and talk.ledger.account.closed


def test_a_checkpoint_ahead_of_the_last_report_counts_as_that_report(talk, worker, learner):
    make_batch(worker)
    learner.fetch(0)
    again = FakeLearner(talk)
    assert again.join(step=1).frontier == 1
    assert talk.ledger.account.tokens["delivered"] == 0 and talk.ledger.account.tokens["trained"] > 0
    (line,) = read_records(talk.config.run_dir / "metrics.jsonl")
    assert line["step"] == 1


def test_a_replayed_step_with_another_loss_is_warned_of_and_counted(talk, worker, learner, caplog):
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    for loss, counted in [(0.5, (1, 0)), (0.5 + 1e-7, (2, 0)), (0.5001, (2, 1)), (math.nan, (2, 2))]:
        again = joined(FakeLearner(talk), step=0)
        again.consume(0, loss=loss)
        assert talk.service.recorder.replays == dict(zip(("same", "different"), counted, strict=True))
    said = [record.getMessage() for record in caplog.records if "was replayed" in record.getMessage()]
    assert [line.partition(":")[0] for line in said] == [
        f"step 1 was replayed with a loss of {loss} where 0.5 had been logged" for loss in (0.5001, math.nan)
    ]
    (line,) = read_records(talk.config.run_dir / "metrics.jsonl")
    assert line["learner"]["loss"] == 0.5


def test_a_report_that_is_repeated_is_written_down_once(talk, worker, learner):
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    learner.consume(0)
    assert len(read_records(talk.config.run_dir / "metrics.jsonl")) == 1


def test_a_learner_says_its_checkpoint_before_it_fetches(talk):
    learner = FakeLearner(talk)
    learner.hello()
    learner.say(wire.Fetch(0))
    assert "checkpoint" in learner.take(wire.Refused)[-1].message.reason


def test_a_learner_that_this_run_cannot_serve_is_refused(talk):
    learner = FakeLearner(talk)
    learner.hello()
    learner.say(wire.StartLearner(7, ""))
    assert "checkpoint 7" in learner.take(wire.Refused)[-1].message.reason


def test_a_learner_that_outlives_the_broker_goes_on_without_a_new_incarnation(talk, worker, learner):
    make_batch(worker)
    batch = learner.fetch(0)
    talk.restart_broker()
    learner = FakeLearner(talk, learner.name)
    assert learner.hello().weights_address == "tcp://weights"
    assert learner.fetch(0) == batch
    learner.consume(0)
    learner.consume(0)
    assert (talk.ledger.learner.incarnation, talk.ledger.steps.consumed) == (0, 1)


def test_a_start_that_is_repeated_after_a_restart_opens_no_second_incarnation(talk, learner):
    talk.restart_broker()
    learner = FakeLearner(talk, learner.name)
    assert learner.join(step=0).incarnation == 0
    assert FakeLearner(talk).join(step=0).incarnation == 1


def test_a_learner_that_was_replaced_is_refused_when_it_comes_back(talk, worker, learner):
    make_batch(worker)
    successor = joined(FakeLearner(talk), step=0)
    learner.hello()
    for pending in (wire.Fetch(0), wire.Consumed(0, {}), wire.Durable(0, 0)):
        learner.say(pending)
        assert "checkpoint" in learner.take(wire.Refused)[-1].message.reason
    assert talk.ledger.steps.consumed == 0
    successor.hello()
    successor.consume(0)
    successor.durable(1)


def test_a_run_that_is_over_still_replays_what_a_restarted_learner_lacks(talk, worker, learner):
    make_batch(worker)
    batch = learner.fetch(0)
    learner.consume(0)
    talk.service.stop("enough", "stopped", talk.now)
    again = joined(FakeLearner(talk), step=0)
    assert again.fetch(0) == batch
    again.consume(0)
    assert again.fetch(1) is None and again.take(wire.Finished)


def test_what_a_checkpoint_holds_leaves_memory_without_a_garbage_collection(talk, worker, learner):
    make_batch(worker)
    groups = [weakref.ref(group) for group in talk.ledger.deliveries[0]]
    learner.consume(0)
    gc.disable()
    try:
        learner.say(wire.Durable(1, 1))
        assert [group() for group in groups] == [None] * 4
    finally:
        gc.enable()


def test_the_next_batch_may_be_asked_for_while_another_is_trained(talk, worker, learner):
    make_batch(worker)
    worker.abort_all()
    learner.fetch(0)
    learner.say(wire.Fetch(1))
    assert not learner.take(wire.Batch) and not learner.take(wire.Refused)
    learner.consume(0)
    worker.hold(1)
    make_batch(worker)
    (part,) = learner.take(wire.Batch)
    assert part.message.step == 1
    learner.say(wire.Fetch(3))
    assert "does not follow" in learner.take(wire.Refused)[-1].message.reason


def test_a_batch_without_a_finite_loss_is_discarded_and_delivered_again_after_a_restart(talk, worker, learner):
    make_batch(worker)
    batch = learner.fetch(0)
    tokens = talk.ledger.account.tokens["delivered"]
    learner.consume(0, "nonfinite")
    account = talk.ledger.account.summary()
    assert (account["discarded"]["nonfinite"], account["delivered"], account["trained"]) == (tokens, 0, 0)
    assert talk.ledger.account.closed and talk.ledger.steps.consumed == 1
    talk.restart_broker()
    assert talk.ledger.account.summary() == account
    again = joined(FakeLearner(talk), step=0)
    assert talk.ledger.account.tokens["delivered"] == tokens and not talk.ledger.account.discarded["nonfinite"]
    assert talk.ledger.account.closed and again.fetch(0) == batch
    again.consume(0, "nonfinite")
    assert talk.ledger.account.summary() == account and talk.ledger.account.closed


def folder(incarnation, step):
    return wire.WeightFolder(Version(incarnation, step), f"{step:064x}")


def test_workers_are_told_of_the_last_two_snapshots_of_weights_also_by_a_restarted_broker(talk, worker, learner):
    """A worker that comes later needs no learner for them."""
    make_batch(worker)
    learner.consume(0)
    for step in (0, 1, 1, 0):  # a message may come twice
        learner.say(wire.WeightsWritten(folder(0, step)))
        assert learner.take(wire.Accepted)
    told = [received.message.folders for received in worker.take(wire.WeightFolders)]
    assert told == [[folder(0, 0)], [folder(0, 1), folder(0, 0)]]
    successor = joined(FakeLearner(talk), step=0)
    successor.say(wire.WeightsWritten(folder(1, 0)))
    assert successor.take(wire.Accepted)
    talk.restart_broker()
    assert FakeWorker(talk, "late").hello().weight_folders == [folder(1, 0), folder(0, 1)]


def test_snapshots_of_weights_that_are_none_of_the_learner_s_are_refused(talk, worker, learner):
    joined(FakeLearner(talk), step=0)
    learner = joined(FakeLearner(talk), step=0)
    for version in ((1, 0), (3, 0), (2, 1)):
        learner.say(wire.WeightsWritten(folder(*version)))
        assert "none of this learner" in learner.take(wire.Refused)[-1].message.reason
    assert not talk.ledger.learner.weight_folders


def test_snapshots_that_a_worker_cannot_use_are_counted(talk, worker):
    worker.say(wire.WeightFolderRefused(Version(0, 0), "model-0000-0000.safetensors is damaged"))
    found = talk.service.context.failures
    assert found.by_cause == {"weights_refused": 1} and "is damaged" in found.last["weights_refused"]
