"""The broker's service as a whole without sockets: sessions, roles, restarts, and the end of a run."""

import orjson
import pytest

from april import config as configuration
from april import wire
from april.broker.journal.files import JournalError
from april.config import ConfigError
from april.launch.preflight import check_resume
from april.observe.report.run_folder import read_records
from april.util.versions import RUN_FOLDER
from april.wire.message import Version
from tests.support.broker_conversation import (
    FakeLearner,
    FakeWorker,
    Peer,
    finish_evaluation,
    joined,
    make_batch,
    training,
)


def test_a_failed_sync_acknowledges_nothing(talk, worker, monkeypatch):
    grant = worker.grants()[0]

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("april.broker.journal.journal.os.fdatasync", fail)
    with pytest.raises(JournalError, match="No space left"):
        worker.chunk(grant, 0, 3)
    assert worker.take(wire.Answers) == []


def test_a_reconnected_peer_has_to_say_hello_before_it_is_heard(talk, worker):
    frames = [bytes(f) for f in wire.encode(wire.Heartbeat([]), [], worker.session, 1)]
    talk.service.handle(b"w0/new-connection", frames, talk.now)
    talk.tick()
    refusal = worker.take(wire.Refused)[-1]
    assert "unknown session" in refusal.message.reason and refusal.session == worker.session


def test_session_ids_are_never_reused(talk, worker):
    before = [worker.session, *(FakeWorker(talk, f"early-{number}").hello().session for number in range(3))]
    talk.restart_broker()
    other = joined(FakeWorker(talk, "w1"))
    assert other.session > max(before)
    worker.conversation.peers[b"w0"] = worker
    worker.say(wire.WorkerCapacity(Version(0, 0), 999))
    assert "unknown session" in worker.take(wire.Refused)[-1].message.reason
    assert [session.capacity for session in talk.service.peers.workers()] == [10]


def test_a_run_in_which_every_sample_fails_is_given_up(talk, worker, learner):
    for _ in range(500):
        if talk.service.run.over:
            break
        for grant in worker.grants():
            worker.report(closings=[wire.GiveBack(grant.lease_id, 0, "scoring_failed", "the verifier is broken")])
    assert talk.service.run.state == "failed" and "the verifier is broken" in talk.service.run.over
    assert worker.take(wire.Stop) and talk.ledger.account.closed


def test_no_lease_of_the_next_round_before_its_version_and_the_longest_partials_come_first(talk, worker, learner):
    aborted = make_batch(worker)
    aborted += training(worker.grants())
    learner.fetch(0)
    learner.consume(0)
    for number, grant in enumerate(aborted):
        worker.chunk(grant, 0, number + 1)
        worker.report(closings=[wire.GiveBack(grant.lease_id, number + 1, "abort")])
    assert training(worker.grants()) == []
    worker.hold(1)
    resumed = training(worker.grants())
    assert [(g.group, g.index) for g in resumed[: len(aborted)]] == [(g.group, g.index) for g in reversed(aborted)]
    assert all(24 - grant.max_new_tokens > 0 for grant in resumed[: len(aborted)])


def test_a_restarted_broker_remembers_everything_it_acknowledged(talk, worker, learner):
    make_batch(worker)
    batch = learner.fetch(0)
    learner.consume(0)
    aborted = next(lease_id for lease_id, lease in talk.ledger.leases.items() if lease.generating)
    account, epoch = talk.ledger.account.summary(), talk.ledger.serials.starts
    talk.restart_broker()
    assert talk.ledger.account.summary() == account and talk.ledger.serials.starts == epoch + 1
    worker = FakeWorker(talk)
    welcome = worker.join(step=0, leases=[aborted, 99])
    assert welcome.lost_lease_ids == [99] and welcome.watermark >= aborted
    again = joined(FakeLearner(talk), step=0)
    assert again.fetch(0) == batch


def test_messages_of_a_session_whose_connection_is_gone_are_refused(talk, worker):
    talk.service.peers.invalidate(b"w0/data")
    worker.take(wire.Refused)
    worker.say(wire.Heartbeat(), connection=b"control")
    assert "unknown session" in worker.take(wire.Refused)[-1].message.reason
    worker.join(step=0, leases=list(talk.ledger.leases))
    worker.say(wire.Heartbeat(), connection=b"control")
    assert not worker.take(wire.Refused)


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
def test_a_journal_of_another_run_is_refused(talk, converse, change):
    talk.journal.close()
    with pytest.raises(JournalError, match="belongs to another run"):
        converse(*change)


def test_a_resume_with_another_configuration_names_the_key_and_both_values(talk, config_file):
    talk.journal.close()
    RUN_FOLDER.claim(talk.config.run_dir, new=True)
    before = {path: path.read_bytes() for path in talk.config.run_dir.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"sampling\.temperature"):
        check_resume(configuration.load(config_file, ["--sampling.temperature", "0.5"]))
    assert {path: path.read_bytes() for path in talk.config.run_dir.rglob("*") if path.is_file()} == before


def test_peers_may_send_only_what_their_role_permits(talk, worker, learner):
    worker.say(wire.Fetch(0))
    assert "not for a worker" in worker.take(wire.Refused)[-1].message.reason
    learner.say(wire.Report())
    assert "not for a learner" in learner.take(wire.Refused)[-1].message.reason


def test_status_and_metrics_agree_with_the_ledger(talk, worker, learner, config_file):
    make_batch(worker)
    learner.fetch(0)
    learner.consume(0)
    monitor = Peer(talk, "monitor", "m")
    monitor.hello()
    monitor.say(wire.StatusRequest())
    status = orjson.loads(monitor.take(wire.Status)[-1].arrays[0].tobytes())
    assert status["step"] == 1 and status["reward"] == 1.0 and status["ledger_closed"]
    (record,) = read_records(talk.config.run_dir / "metrics.jsonl")
    assert record["step"] == 1 and record["tokens"] == 8 * 4 and record["staleness"]["tokens_by_age"] == {"0": 32}
    summary = orjson.loads((talk.config.run_dir / "summary.json").read_bytes())
    tokens = summary["tokens"]
    parts = [tokens[key] for key in ("trained", "delivered", "ready", "open")] + list(tokens["discarded"].values())
    assert tokens["generated"] == sum(parts) and summary["ledger_closed"]


def test_a_broker_of_a_finished_run_waits_for_the_learner_that_has_yet_to_export_its_policy(talk):
    talk.service.stop("all steps are done", "finished", talk.now)
    assert not talk.service.everyone_left()
    learner = joined(FakeLearner(talk))
    learner.say(wire.Goodbye())
    assert talk.service.everyone_left()
    talk.restart_broker()
    talk.service.stop("all steps are done", "finished", talk.now)
    assert not talk.service.everyone_left()
    talk.config.exported_policy.mkdir(parents=True)
    assert talk.service.everyone_left()


def test_absurd_counts_of_workers_do_not_break_the_status(talk):
    for number in range(3):
        worker = joined(FakeWorker(talk, f"w{number}"))
        worker.say(wire.Heartbeat([], 2**53))
        worker.say(wire.Goodbye())
    talk.service.recorder.unacknowledged_before = 2**64
    monitor = Peer(talk, "monitor", "m")
    monitor.hello()
    monitor.say(wire.StatusRequest())
    status = orjson.loads(monitor.take(wire.Status)[-1].arrays[0].tobytes())
    assert status["tokens"]["emitted_unacked"] == 2**53


def test_the_run_ends_when_its_steps_are_trained_and_the_last_evaluation_is_in(talk, worker, learner):
    for step in range(3):
        make_batch(worker)
        worker.abort_all()
        assert learner.fetch(step)
        learner.consume(step)
        learner.say(wire.Fetch(step + 1))
        worker.hold(step + 1)
    assert not learner.take(wire.Finished)
    finish_evaluation(worker)
    assert learner.take(wire.Finished) and len(worker.take(wire.Stop)) == 1
    assert [e["step"] for e in talk.ledger.evaluated.values()] == [0, 3]
    worker.say(wire.Goodbye())
    learner.say(wire.Goodbye())
    assert talk.service.everyone_left()
