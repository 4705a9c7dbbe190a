"""An operator's commands against a broker's real process: status, drain over a restart, dead letters, JSON logs."""

import orjson
import pytest

from april.broker.ledger import events
from april.cli import main
from april.config import load
from april.observe.operate import RunAddress
from april.util.lifetime import STEPPED_ASIDE
from april.util.versions import FILE
from tests.support.broker_conversation import Conversation, FakeWorker, make_batch
from tests.support.page_client import Client, Worker
from tests.support.refusals import refusal
from tests.support.run_processes import wait_until

OVERRIDES = ["--evaluation.prompts", "1", "--broker.attempts", "1", "--operations.log_format", "json"]
TIMES = ["--broker.readopt_s", "0.5", "--broker.session_timeout_s", "100"]


@pytest.fixture
def start_broker(start_broker):
    return lambda *more: start_broker(*OVERRIDES, *TIMES, *more)


@pytest.mark.full
def test_damage_in_an_old_journal_file_is_found_after_the_start_and_costs_a_group(start_broker, config_file, run_dir):
    """The file lies before the snapshot, so a start does not read it."""
    small = ["--broker.journal_file_records", "100", "--broker.attempts", "1", "--evaluation.prompts", "1"]
    talk = Conversation(load(config_file, small))
    worker = FakeWorker(talk)
    worker.join()
    make_batch(worker)
    bad = talk.ledger.deliveries[0][0]
    place = next(iter(bad.samples[0].chunk_refs))
    while not talk.service.snapshots.store.positions():
        talk.ledger.commit(events.DrainEnded())
        talk.take_snapshot()
    talk.journal.close()
    with (run_dir / "journal" / f"{0:020d}.msgpack").open("r+b") as file:
        file.seek(place.record + place.offset)
        file.write(b"\xff")
    broker = start_broker(*small)
    wait_until(lambda: f"group {bad.id} cannot be read back" in broker.output, broker)
    status = RunAddress(run_dir, None, None).status()
    assert not status["read_only"] and status["tokens"]["discarded"]["unreadable"] == bad.tokens
    assert status["ledger_closed"]
    broker.process.terminate()
    assert broker.wait() == 0


class Peers:
    """A learner and a worker that keep their sessions alive while the test waits."""

    def __init__(self, address):
        self.learner, self.worker = Client(address, "learner", "raw-learner"), Worker(address)
        self.learner.hello()
        self.learner.ask("LearnerAdmitted", "StartLearner", 0, "tcp://127.0.0.1:9")
        self.worker.hello()
        self.worker.send("WorkerCapacity", [0, 0], 6, 0.0)

    def beat(self):
        self.learner.receive()
        self.worker.receive()

    def close(self):
        self.learner.close()
        self.worker.close()


def said(capsys, *arguments):
    """Output of a command, which must succeed."""
    assert main(list(arguments)) == 0, capsys.readouterr().err
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.full
def test_an_operator_drains_restarts_and_requeues(start_broker, run_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    broker = start_broker()
    run, peers = str(run_dir), Peers(broker.address)
    try:
        dead = peers.worker.next_training_lease([0, 0])
        peers.worker.report(["GiveBack", dead.id, 0, "generation_failed", "engine fell over"])
        peers.worker.done(dead)
        while (kept := peers.worker.next_training_lease([0, 0])).sample[0] == dead.sample[0]:
            peers.worker.leases.pop(kept.id)
        peers.worker.generate(kept, 3, [0, 0])
        group = str(dead.sample[0])
        status = said(capsys, "status", run)
        assert "broker of run small" in status and "1 learner, 1 monitor, 1 worker" in status
        listed = said(capsys, "dead-letters", "--connect", broker.address)
        assert f"{group} {dead.sample[1]} " in listed and "discarded engine fell over" in listed
        assert said(capsys, "dead-letters", run, "--requeue", group) == f"re-queued: {group}"
        assert said(capsys, "dead-letters", run, "--requeue", "all") == "re-queued: none that was not already"

        assert "draining" in said(capsys, "drain", run)
        _, peers.worker.watermark = peers.worker.take("Abort").fields
        peers.worker.give_back(kept, "abort")
        for lease in list(peers.worker.leases.values()):
            peers.worker.end(lease, [0, 0])

        def drained():
            """Grants that were under way may come after the abort."""
            peers.beat()
            while peers.worker.has_leases:
                peers.worker.end(peers.worker.next_lease(), [0, 0])
            return "nothing leased" in said(capsys, "status", run)

        wait_until(drained, broker)

        broker.process.terminate()
        assert broker.wait() == STEPPED_ASIDE
        assert not peers.worker.find("Stop"), "who is drained waits for the next broker"
    finally:
        peers.close()
    logged = [orjson.loads(line) for line in broker.output.splitlines()]
    (death,) = [line for line in logged if "is dead" in line["message"]]
    assert (death["run"], death["group"], death["sample"]) == ("small", *dead.sample)
    assert any(line.get("worker") == "raw-worker" and "engine fell over" in line["message"] for line in logged)

    assert "no broker answers" in said(capsys, "status", run)
    again = start_broker()
    wait_until(lambda: "drained" in said(capsys, "status", "--connect", again.address), again)
    peers = Peers(again.address)
    try:
        peers.worker.receive(1000)
        assert not peers.worker.has_leases
        assert "handed out again" in said(capsys, "drain", run, "--end")
        resumed = peers.worker.next_training_lease([0, 0])
        assert (resumed.sample, resumed.ids) == (kept.sample, kept.ids), "partials go first, with what is durable"
    finally:
        peers.close()
    again.process.terminate()
    again.wait()
    assert "requeued engine fell over" in said(capsys, "dead-letters", run)
    said_without_broker = said(capsys, "dead-letters", run, "--requeue", group)
    assert "re-queued: none that was not already" in said_without_broker and "no broker runs" in said_without_broker


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["status"], "--connect"),
        (["drain", "nowhere"], "run folder nowhere does not exist"),
        (["dead-letters", "--connect", "garbage"], "'garbage' is no address"),
        (["dead-letters", "runs", "--requeue", "some"], "'--requeue' = 'some'"),
    ],
)
def test_arguments_that_name_no_run_are_refused_with_a_sentence(arguments, named, capsys):
    assert named in refusal(capsys, *arguments)


def test_a_stale_address_does_not_lead_to_another_run_s_broker(start_broker, run_dir, capsys):
    """A killed broker leaves its address behind, and another run's broker may get its port."""
    broker = start_broker()
    other = run_dir.with_name("other")
    other.mkdir()
    (other / "address").write_text(broker.address)
    (other / FILE).write_bytes((run_dir / FILE).read_bytes())
    (other / "config.toml").write_text((run_dir / "config.toml").read_text().replace('"small"', '"other"'))
    for command in (["drain"], ["dead-letters", "--requeue", "all"]):
        assert main([*command, str(other)]) == 1
        assert "is that of run 'small', not of" in capsys.readouterr().err
    assert "the run folder says" in said(capsys, "status", str(other))
    assert "draining" not in said(capsys, "status", str(run_dir))
