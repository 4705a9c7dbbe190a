"""What the broker answers to workers and learner: the conversation of the protocol, without sockets."""

import numpy as np
import orjson
import pytest

from april import config as configuration
from april import wire
from april.broker.journal import JournalError
from april.version import Version
from tests.broker.conversation import Conversation, FakeLearner, FakeWorker, Peer


@pytest.fixture
def talk(config_file):
    return Conversation(configuration.load(config_file, ["--evaluation.prompts", "1"]))


@pytest.fixture
def worker(talk):
    worker = FakeWorker(talk)
    worker.join()
    return worker


@pytest.fixture
def learner(talk):
    learner = FakeLearner(talk)
    learner.join()
    return learner


def training(grants):
    return [grant for grant in grants if not grant.evaluation]


def finish_evaluation(worker):
    grants = worker.grants()
    for grant in grants:
        if grant.evaluation:
            worker.complete(grant)
    return training(grants) + training(worker.grants())


def make_batch(worker):
    """Complete groups until a batch is delivered; returns the grants that were aborted."""
    grants, ledger = finish_evaluation(worker), worker.conversation.ledger
    before = ledger.next_step
    while ledger.next_step == before:
        grant = grants.pop(0)
        worker.complete(grant)
        grants += training(worker.grants())
    return grants


def test_a_worker_gets_as_many_leases_as_it_has_room_for(worker):
    grants = worker.grants()
    assert len(grants) == 10
    assert len({grant.token for grant in grants}) == len({grant.seed for grant in grants}) == 10


def test_a_worker_without_weights_or_control_connection_gets_nothing(talk):
    worker = FakeWorker(talk)
    worker.hello()
    assert worker.grants() == []


def test_a_grant_carries_prompt_label_and_budget(talk, worker):
    received = worker.take(wire.Grant)[-1]
    grant, [tokens] = received.message, received.arrays
    text = talk.service.prompts.tokenizer.decode(tokens)
    assert len(tokens) == len(text) and text.endswith("=")
    assert grant.max_new_tokens == 24 and grant.label.isdigit() and grant.reward == "final_answer"


def test_a_chunk_is_acknowledged_only_after_it_is_on_disk(talk, worker):
    grant = worker.grants()[0]
    size = talk.journal.bytes_on_disk
    worker.chunk(grant, 0, 3)
    assert worker.take(wire.Acknowledged)[-1].message == wire.Acknowledged([(grant.token, 3)], [])
    assert sum(path.stat().st_size for path in talk.journal.folder.glob("*.msgpack")) > size


def test_a_failed_sync_acknowledges_nothing(talk, worker, monkeypatch):
    grant = worker.grants()[0]

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("april.broker.journal.os.fdatasync", fail)
    with pytest.raises(JournalError, match="No space left"):
        worker.chunk(grant, 0, 3)
    assert worker.take(wire.Acknowledged) == []


def test_an_id_beyond_the_vocabulary_is_refused(talk, worker):
    grant = worker.grants()[0]
    for largest, answer in ((talk.config.vocabulary, wire.Refused), (talk.config.vocabulary - 1, wire.Acknowledged)):
        worker.say(wire.Chunk(grant.token, 0, worker.version), [np.array([largest], "i4"), np.zeros(1, "f4")])
        assert worker.take(answer)


def test_a_chunk_again_is_a_duplicate_a_gap_is_asked_for(worker):
    grant = worker.grants()[0]
    worker.chunk(grant, 0, 3)
    worker.chunk(grant, 0, 3)
    assert [ack.message.lengths for ack in worker.take(wire.Acknowledged)] == [[(grant.token, 3)]] * 2
    worker.chunk(grant, 5, 2)
    assert worker.take(wire.ResendFrom)[-1].message == wire.ResendFrom(grant.token, 3)
    worker.say(wire.GiveBack(grant.token, 5, "abort"))
    assert worker.take(wire.ResendFrom)[-1].message.start == 3


def test_a_score_ahead_of_its_tokens_asks_for_them(worker):
    grant = worker.grants()[0]
    worker.chunk(grant, 0, 3)
    worker.say(wire.Scored(grant.token, 1.0))
    assert worker.take(wire.ResendFrom)[-1].message.start == 3


def test_an_older_holder_is_refused_for_ever_and_its_tokens_counted(talk, worker):
    grant = worker.grants()[0]
    worker.chunk(grant, 0, 3)
    worker.say(wire.GiveBack(grant.token, 3, "generation_failed", "engine fell over"))
    worker.chunk(grant, 3, 4)
    refusal = worker.take(wire.Refused)[-1].message
    assert refusal.token == grant.token and "not current" in refusal.reason
    assert talk.service.sessions.refused_tokens() == 4
    assert talk.ledger.closed


def test_a_budget_that_is_exceeded_is_a_failed_lease_not_more_tokens(talk, worker):
    grant = worker.grants()[0]
    generated = talk.ledger.tokens["generated"] + talk.ledger.tokens["evaluation"]
    worker.chunk(grant, 0, 25)
    assert "invalid" in worker.take(wire.Refused)[-1].message.reason
    assert talk.ledger.tokens["generated"] + talk.ledger.tokens["evaluation"] == generated
    assert grant.token not in talk.ledger.leases


def test_a_full_budget_without_a_finish_reason_is_refused(worker):
    grant = worker.grants()[0]
    worker.chunk(grant, 0, 24)
    assert "invalid" in worker.take(wire.Refused)[-1].message.reason


def test_a_version_that_was_never_published_is_refused(talk, worker):
    grant = worker.grants()[0]
    worker.chunk(grant, 0, 3, version=Version(0, 1))
    assert "invalid" in worker.take(wire.Refused)[-1].message.reason
    worker.say(wire.Holding(Version(0, 1), 5))
    assert "never published" in worker.take(wire.Refused)[-1].message.reason
    assert next(iter(talk.service.sessions.workers())).version == Version(0, 0)


def test_a_worker_without_room_gets_nothing(talk):
    worker = FakeWorker(talk)
    worker.join(capacity=0)
    assert worker.grants() == []


def test_a_lost_worker_s_sample_goes_on_elsewhere_with_every_acknowledged_token(talk, worker):
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 5)
    other = FakeWorker(talk, "w1")
    talk.now += 9.0
    other.join()
    talk.tick(2.0)
    resumed = {(g.message.group, g.message.index): g for g in other.take(wire.Grant)}[grant.group, grant.index]
    assert np.concatenate(resumed.arrays[1:]).tolist() == [2, 3, 4, 5, 6]
    assert resumed.message.max_new_tokens == 19 and resumed.message.seed == grant.seed
    worker.chunk(grant, 5, 1)
    assert "unknown session" in worker.take(wire.Refused)[-1].message.reason


def test_a_restarted_worker_frees_its_predecessor_s_samples_at_once(talk, worker):
    held = {(grant.group, grant.index) for grant in worker.grants()}
    successor = FakeWorker(talk, "w0", uid="another-process")
    successor.join()
    assert {(grant.group, grant.index) for grant in successor.grants()} == held


def test_a_worker_that_fell_silent_may_come_back_with_what_is_still_its_own(talk, worker):
    tokens = [grant.token for grant in worker.grants()]
    welcome = worker.join(leases=[*tokens, 12345])
    assert welcome.lost == [12345]
    assert set(tokens) <= set(talk.ledger.leases)


def test_a_predecessor_that_still_lives_is_told_to_stop(talk, worker):
    successor = FakeWorker(talk, "w0-again")
    successor.say(wire.Hello("worker", "w0", "another-process"))
    assert "taken the name" in worker.take(wire.Stop)[-1].message.reason
    assert [session.uid for session in talk.service.sessions.workers()] == ["another-process"]


def test_a_reconnected_peer_has_to_say_hello_before_it_is_heard(talk, worker):
    frames = [bytes(f) for f in wire.encode(wire.Heartbeat([]), [], worker.session, 1)]
    talk.service.handle(b"w0/new-connection", frames, talk.now)
    talk.tick()
    refusal = worker.take(wire.Refused)[-1]
    assert "unknown session" in refusal.message.reason and refusal.session == worker.session


def test_a_session_s_number_is_never_given_to_another(talk, worker):
    before = worker.session
    talk.restart_broker()
    other = FakeWorker(talk, "w1")
    other.join()
    assert other.session != before
    worker.conversation.peers[b"w0"] = worker
    worker.say(wire.Holding(Version(0, 0), 999))
    assert "unknown session" in worker.take(wire.Refused)[-1].message.reason
    assert [session.capacity for session in talk.service.sessions.workers()] == [10]


def test_what_was_generated_but_not_scored_is_only_scored_again(talk, worker):
    grant = finish_evaluation(worker)[0]
    worker.chunk(grant, 0, 5, "stop")
    successor = FakeWorker(talk, "w0", uid="another-process")
    successor.join()
    again = next(
        g for g in successor.take(wire.Grant) if (g.message.group, g.message.index) == (grant.group, grant.index)
    )
    assert again.message.scoring and again.message.finish_reason == "stop"
    assert [len(array) for array in again.arrays[1:]] == [5]
    successor.say(wire.Scored(again.message.token, 0.0))
    assert successor.take(wire.Acknowledged)[-1].message.done == [again.message.token]


def test_a_sample_that_keeps_failing_is_dead_and_its_group_discarded_with_the_reason(talk, worker):
    group = finish_evaluation(worker)[0].group
    for _ in range(200):
        if group not in talk.ledger.groups:
            break
        for grant in worker.grants():
            if grant.group == group:
                worker.say(wire.GiveBack(grant.token, 0, "generation_failed", "no"))
            else:
                worker.complete(grant)
        for token, lease in list(talk.ledger.leases.items()):
            if lease.sample.group.id == group:
                worker.say(wire.GiveBack(token, lease.sample.length, "generation_failed", "no"))
    assert talk.ledger.counts["dead_sample"] == 1
    assert talk.ledger.closed


def test_a_run_in_which_every_sample_fails_is_given_up(talk, worker, learner):
    for _ in range(500):
        if talk.service.over:
            break
        for grant in worker.grants():
            worker.say(wire.GiveBack(grant.token, 0, "scoring_failed", "the verifier is broken"))
    assert talk.service.state == "failed" and "the verifier is broken" in talk.service.over
    assert worker.take(wire.Stop) and talk.ledger.closed


def test_a_discarded_group_s_other_samples_are_cancelled(talk, worker):
    grants = finish_evaluation(worker)
    group = grants[0].group
    siblings = [grant.token for grant in grants if grant.group == group][1:]
    token = grants[0].token
    while token in talk.ledger.leases:
        sample = talk.ledger.leases[token].sample
        worker.say(wire.GiveBack(token, 0, "generation_failed", "no"))
        token = sample.token
    assert {token for cancel in worker.take(wire.Cancel) for token in cancel.message.tokens} >= set(siblings)


def test_n_complete_groups_make_a_batch_and_abort_the_rest(talk, worker, learner):
    aborted = make_batch(worker)
    abort = worker.take(wire.Abort)[-1].message
    assert all(grant.token <= abort.watermark for grant in aborted)
    batch, arrays = learner.fetch(0)
    assert len(batch.groups) == 4 and all(len(group.samples) == 2 for group in batch.groups)
    expected = []
    for head in batch.groups:
        expected.append(head.prompt_tokens)
        expected += [sample.response_tokens for sample in head.samples for _ in ("ids", "logprobs")]
    assert [len(array) for array in arrays] == expected


def test_the_same_step_gives_the_identical_batch(worker, learner):
    make_batch(worker)
    assert learner.fetch(0) == learner.fetch(0)


def test_a_batch_comes_in_parts_that_make_the_whole(worker, learner, monkeypatch):
    make_batch(worker)
    whole, arrays = learner.fetch(0)
    monkeypatch.setattr("april.broker.learner_desk.PART_BYTES", 1)
    parts = learner.fetch_parts(0)
    assert [(part.message.first, part.message.total, len(part.message.groups)) for part in parts] == [
        (place, 4, 1) for place in range(4)
    ]
    assert [group for part in parts for group in part.message.groups] == whole.groups
    assert [array.tolist() for part in parts for array in part.arrays] == arrays


def test_a_learner_that_does_not_read_is_sent_no_more_than_its_credit(talk, worker, learner, monkeypatch):
    make_batch(worker)
    monkeypatch.setattr("april.broker.learner_desk.PART_BYTES", 1)
    talk.service.credit_bytes = 1
    learner.say(wire.Fetch(0))
    for _ in range(10):
        talk.tick()
    [unread] = learner.take(wire.Batch)
    assert unread.message.first == 0, "one message may exceed the credit"
    learner.received_bytes = sum(array.nbytes for array in unread.arrays)
    assert [part.message.first for part in learner.fetch_parts(0)][-1] == 3


def test_a_worker_that_does_not_read_is_sent_no_more_than_its_credit(talk, worker):
    sent = len(worker.grants())
    talk.service.credit_bytes = 1
    worker.hold(0, capacity=50)
    talk.tick()
    assert worker.grants() == []
    received = talk.service.sessions.workers()[0].sent_bytes
    worker.say(wire.Heartbeat([], 0, received), connection=b"control")
    assert 1 <= len(worker.grants()) < 50 - sent


def test_no_lease_of_the_next_round_before_its_version_and_partials_come_first(talk, worker, learner):
    aborted = make_batch(worker)
    aborted += training(worker.grants())
    learner.fetch(0)
    learner.consume(0)
    for number, grant in enumerate(aborted):
        worker.chunk(grant, 0, number + 1)
        worker.say(wire.GiveBack(grant.token, number + 1, "abort"))
    assert training(worker.grants()) == []
    worker.hold(1)
    resumed = training(worker.grants())
    assert [(g.group, g.index) for g in resumed[: len(aborted)]] == sorted((g.group, g.index) for g in aborted)
    assert all(24 - grant.max_new_tokens > 0 for grant in resumed[: len(aborted)])


def test_an_abort_that_is_not_answered_ends_with_its_deadline(talk, worker, learner):
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    worker.hold(1)
    held = list(talk.ledger.leases)
    assert held
    for _ in range(8):
        worker.say(wire.Heartbeat(held))
        talk.tick(1.0)
    assert not set(held) & set(talk.ledger.leases)
    resumed = training(worker.grants())
    assert resumed
    assert all(talk.ledger.leases[grant.token].sample.attempts == 0 for grant in resumed)


def test_an_older_version_than_the_lease_s_is_refused(talk, worker, learner):
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    worker.say(wire.Goodbye())
    fresh = FakeWorker(talk, "w9")
    fresh.join(step=1)
    grant = training(fresh.grants())[0]
    fresh.chunk(grant, 24 - grant.max_new_tokens, 1, version=Version(0, 0))
    assert fresh.take(wire.Refused)


def test_a_learner_from_an_older_checkpoint_gets_the_same_deliveries_again(talk, worker, learner):
    batches = []
    for step in range(2):
        make_batch(worker)
        for token in list(talk.ledger.leases):
            worker.say(wire.GiveBack(token, talk.ledger.leases[token].sample.length, "abort"))
        batches.append(learner.fetch(step))
        learner.consume(step)
        if step == 0:
            worker.hold(1)
    again = FakeLearner(talk)
    started = again.join(step=0)
    assert (started.branch, started.frontier) == (1, 2)
    assert talk.ledger.tokens["trained"] == 0 and talk.ledger.closed
    for step, batch in enumerate(batches):
        assert again.fetch(step) == batch
        again.consume(step)
    assert talk.ledger.tokens["delivered"] == 0 and talk.ledger.closed


def test_a_checkpoint_ahead_of_the_last_report_counts_as_that_report(talk, worker, learner):
    make_batch(worker)
    learner.fetch(0)
    again = FakeLearner(talk)
    assert again.join(step=1).frontier == 1
    assert talk.ledger.tokens["delivered"] == 0 and talk.ledger.tokens["trained"] > 0
    (line,) = (talk.config.run_dir / "metrics.jsonl").read_bytes().splitlines()
    assert orjson.loads(line)["step"] == 1


def test_a_report_that_is_repeated_is_written_down_once(talk, worker, learner):
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    learner.consume(0)
    assert len((talk.config.run_dir / "metrics.jsonl").read_bytes().splitlines()) == 1


def test_a_learner_says_its_checkpoint_before_it_fetches(talk):
    learner = FakeLearner(talk)
    learner.hello()
    learner.say(wire.Fetch(0))
    assert "checkpoint" in learner.take(wire.Refused)[-1].message.reason


def test_a_learner_that_this_run_cannot_serve_is_refused(talk):
    learner = FakeLearner(talk)
    learner.hello()
    learner.say(wire.LearnerStart(7, ""))
    assert "checkpoint 7" in learner.take(wire.Refused)[-1].message.reason


def test_a_restarted_broker_remembers_everything_it_acknowledged(talk, worker, learner):
    make_batch(worker)
    batch = learner.fetch(0)
    learner.consume(0)
    aborted = next(token for token, lease in talk.ledger.leases.items() if lease.generating)
    account, epoch = talk.ledger.account(), talk.ledger.epoch
    talk.restart_broker()
    assert talk.ledger.account() == account and talk.ledger.epoch == epoch + 1
    worker = FakeWorker(talk)
    welcome = worker.join(step=0, leases=[aborted, 99])
    assert welcome.lost == [99] and welcome.watermark >= aborted
    again = FakeLearner(talk)
    again.join(step=0)
    assert again.fetch(0) == batch


def test_a_learner_that_outlives_the_broker_goes_on_without_a_new_branch(talk, worker, learner):
    make_batch(worker)
    batch = learner.fetch(0)
    talk.restart_broker()
    learner = FakeLearner(talk, learner.name)
    assert learner.hello().weights_address == "tcp://weights"
    assert learner.fetch(0) == batch
    learner.consume(0)
    learner.consume(0)
    assert (talk.ledger.branch, talk.ledger.consumed) == (0, 1)


def test_a_start_that_is_repeated_after_a_restart_opens_no_second_branch(talk, learner):
    talk.restart_broker()
    learner = FakeLearner(talk, learner.name)
    assert learner.join(step=0).branch == 0
    assert FakeLearner(talk).join(step=0).branch == 1


def test_a_learner_that_was_replaced_is_refused_when_it_comes_back(talk, learner):
    successor = FakeLearner(talk)
    successor.join(step=0)
    learner.hello()
    learner.say(wire.Fetch(0))
    assert "checkpoint" in learner.take(wire.Refused)[-1].message.reason
    successor.hello()
    successor.say(wire.Fetch(0))
    assert not successor.take(wire.Refused)


def test_a_run_that_is_over_still_replays_what_a_restarted_learner_lacks(talk, worker, learner):
    make_batch(worker)
    batch = learner.fetch(0)
    learner.consume(0)
    talk.service.stop("enough", "stopped", talk.now)
    again = FakeLearner(talk)
    again.join(step=0)
    assert again.fetch(0) == batch
    again.consume(0)
    assert again.fetch(1) is None and again.take(wire.Finished)


def test_nothing_counts_over_a_session_whose_connection_is_gone(talk, worker):
    talk.service.sessions.void(b"w0/data")
    worker.take(wire.Refused)
    worker.say(wire.Heartbeat(), connection=b"control")
    assert "unknown session" in worker.take(wire.Refused)[-1].message.reason
    worker.join(step=0, leases=list(talk.ledger.leases))
    worker.say(wire.Heartbeat(), connection=b"control")
    assert not worker.take(wire.Refused)


def test_leases_of_workers_that_do_not_come_back_end_after_a_restart(talk, worker):
    assert talk.ledger.leases
    talk.restart_broker()
    talk.tick(5.0)
    assert talk.ledger.leases
    talk.tick(6.0)
    assert not talk.ledger.leases


@pytest.mark.parametrize(
    "change",
    [
        ["--seed", "5"],
        ["--n-samples-per-prompt", "4"],
        ["--rollout-batch-size", "6"],
        ["--schedule.max_staleness", "4"],
        ["--schedule.min_group_size", "1"],
        ["--broker.attempts", "2"],
        ["--sampling.max_response_tokens", "25"],
    ],
)
def test_a_journal_of_another_run_is_refused(talk, config_file, change):
    talk.journal.close()
    with pytest.raises(JournalError, match="belongs to another run"):
        Conversation(configuration.load(config_file, change))


def test_peers_may_send_only_what_their_role_permits(talk, worker, learner):
    worker.say(wire.Fetch(0))
    assert "not for a worker" in worker.take(wire.Refused)[-1].message.reason
    learner.say(wire.Scored(1, 1.0))
    assert "not for a learner" in learner.take(wire.Refused)[-1].message.reason


@pytest.mark.parametrize(
    ("message", "arrays"),
    [
        (wire.Chunk(1, 0, Version(0, 0)), []),
        (wire.Chunk(1, 0, Version(0, 0)), [np.ones(2, "f4"), np.ones(2, "f4")]),
        (wire.Chunk(1, 0, Version(0, 0)), [np.ones(2, "i4"), np.ones(3, "f4")]),
        (wire.Chunk(1, 0, Version(0, 0), "maybe"), [np.ones(2, "i4"), np.ones(2, "f4")]),
        (wire.Chunk(1, 0, Version(0, 0)), [-np.ones(2, "i4"), np.ones(2, "f4")]),
        (wire.Chunk(1, 0, Version(0, 0)), [np.ones(2, "i4"), np.full(2, np.nan, "f4")]),
        (wire.Chunk(1, 0, Version(0, 0)), [np.ones(0, "i4"), np.ones(0, "f4")]),
        (wire.Chunk(1, -1, Version(0, 0)), [np.ones(2, "i4"), np.ones(2, "f4")]),
        (wire.Chunk(1, 0, Version(0, 2**60)), [np.ones(2, "i4"), np.ones(2, "f4")]),
        (wire.Holding(Version(0, 0), -1), []),
        (wire.Heartbeat([], 2**63), []),
        (wire.Scored(1, float("nan")), []),
        (wire.GiveBack(1, 0, "boredom"), []),
        (wire.Hello("king", "k", "k"), []),
        (wire.Welcome(1, "", 0, 0, 0, [], 1.0, ""), []),
    ],
)
def test_a_message_that_makes_no_sense_is_refused_and_changes_nothing(talk, worker, message, arrays):
    before = (talk.ledger.account(), sorted(talk.ledger.leases))
    worker.say(message, arrays)
    assert worker.take(wire.Refused)
    assert (talk.ledger.account(), sorted(talk.ledger.leases)) == before


def test_with_a_smaller_least_group_the_dead_sample_s_tokens_are_counted_apart(config_file):
    talk = Conversation(configuration.load(config_file, ["--schedule.min_group_size", "1", "--broker.attempts", "1"]))
    worker, learner = FakeWorker(talk), FakeLearner(talk)
    worker.join()
    learner.join()
    victim = finish_evaluation(worker)[0]
    worker.chunk(victim, 0, 5)
    worker.say(wire.GiveBack(victim.token, 5, "generation_failed", "no"))
    held = [lease for lease in talk.ledger.leases.values() if not lease.sample.group.evaluation]
    for lease in held:
        worker.complete(lease)
    batch = None
    for _ in range(20):
        batch = batch or learner.fetch(0)
        for grant in training(worker.grants()):
            worker.complete(grant)
    sizes = {group.group: len(group.samples) for group in batch[0].groups}
    assert sizes[victim.group] == 1 and sum(sizes.values()) == 7
    assert talk.ledger.discarded["dead_sample"] == 5 and talk.ledger.closed
    assert talk.ledger.tokens["delivered"] == 7 * 4


def test_garbage_is_counted_and_survived(talk, worker):
    for frames in ([b""], [b"x" * 24, b"y"], [b"AP" + b"\xff" * 22, b"\xc1"], []):
        talk.service.handle(b"w0/data", frames, talk.now)
    talk.tick()
    assert sum(talk.service.sessions.refusals.values()) == 4


def test_status_and_metrics_tell_the_ledger(talk, worker, learner, config_file):
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    monitor = Peer(talk, "monitor", "m")
    monitor.hello()
    monitor.say(wire.StatusRequest())
    status = orjson.loads(monitor.take(wire.Status)[-1].arrays[0].tobytes())
    assert status["step"] == 1 and status["reward"] == 1.0 and status["ledger_closed"]
    (line,) = (talk.config.run_dir / "metrics.jsonl").read_bytes().splitlines()
    record = orjson.loads(line)
    assert record["step"] == 1 and record["tokens"] == 8 * 4 and record["staleness"]["tokens_by_age"] == {"0": 32}
    summary = orjson.loads((talk.config.run_dir / "summary.json").read_bytes())
    tokens = summary["tokens"]
    parts = [tokens[key] for key in ("trained", "delivered", "ready", "open")] + list(tokens["discarded"].values())
    assert tokens["generated"] == sum(parts) and summary["ledger_closed"]


def test_the_run_ends_when_its_steps_are_trained_and_the_last_evaluation_is_in(talk, worker, learner):
    for step in range(3):
        make_batch(worker)
        for token in list(talk.ledger.leases):
            worker.say(wire.GiveBack(token, talk.ledger.leases[token].sample.length, "abort"))
        assert learner.fetch(step)
        learner.consume(step)
        learner.say(wire.Fetch(step + 1))
        worker.hold(step + 1)
    assert not learner.take(wire.Finished)
    finish_evaluation(worker)
    assert learner.take(wire.Finished) and worker.take(wire.Stop)
    assert [e["step"] for e in talk.service.recorder.evaluations.values()] == [0, 3]
    worker.say(wire.Goodbye())
    learner.say(wire.Goodbye())
    assert talk.service.everyone_left()
