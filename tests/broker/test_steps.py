"""What the broker remembers of trained steps, and what it says of the time left."""

import orjson
import pytest

from april import config as configuration
from april import wire
from april.broker.views.status import status
from tests.broker.conversation import Conversation, FakeLearner, FakeWorker, make_batch

MAX_STEPS = 8


@pytest.fixture
def talk(config_file):
    overrides = ["--evaluation.prompts", "1", "--schedule.max_steps", str(MAX_STEPS)]
    return Conversation(configuration.load(config_file, overrides))


def train(talk, worker, learner, step):
    make_batch(worker)
    for lease_id in list(talk.ledger.leases):
        worker.report(closings=[wire.GiveBack(lease_id, talk.ledger.leases[lease_id].sample.length, "abort")])
    learner.fetch(step)
    learner.consume(step)
    worker.hold(step + 1)


def eta_s(talk):
    return status(talk.service.books, talk.now)["eta_s"]


def summary(talk):
    talk.tick(1.0)
    return orjson.loads((talk.config.run_dir / "summary.json").read_bytes())


def test_the_time_left_goes_by_the_pace_since_the_broker_started(talk, worker, learner):
    for step in range(3):
        talk.tick(4.0)
        train(talk, worker, learner, step)
    assert eta_s(talk) == 4.0 * (MAX_STEPS - 3)
    talk.now += 3600.0
    talk.restart_broker()
    learner, worker = FakeLearner(talk), FakeWorker(talk)
    learner.join(step=3)
    worker.join(step=3)
    for step in (3, 4):
        assert eta_s(talk) is None
        talk.tick(8.0)
        train(talk, worker, learner, step)
    assert eta_s(talk) == 8.0 * (MAX_STEPS - 5)


def test_a_step_that_the_journal_never_heard_of_is_no_replay_and_its_line_is_written_anew(talk, worker, learner):
    train(talk, worker, learner, 0)
    make_batch(worker)
    learner.fetch(1)
    before = journal_bytes(talk)
    learner.consume(1)
    lines = metrics_lines(talk)
    talk.journal.close()
    for path, data in before.items():
        path.write_bytes(data)  # the broker dies after the line and before the sync
    talk.peers = {}
    talk.start()
    assert metrics_lines(talk) == lines[:1]
    learner, worker = FakeLearner(talk), FakeWorker(talk)
    learner.join(step=1)
    learner.fetch(1)
    learner.consume(1)
    assert [orjson.loads(line)["step"] for line in metrics_lines(talk)] == [1, 2]
    assert summary(talk)["replays"] == {"same": 0, "different": 0}


def journal_bytes(talk):
    return {path: path.read_bytes() for path in talk.journal.folder.glob("*.msgpack")}


def metrics_lines(talk):
    return (talk.config.run_dir / "metrics.jsonl").read_bytes().splitlines()


def test_lines_that_no_learner_can_go_back_to_are_forgotten_and_their_sums_are_not(talk, worker, learner):
    for step in range(5):
        train(talk, worker, learner, step)
    recorder, whole = talk.service.recorder, summary(talk)
    assert list(recorder.steps) == [0, 1, 2, 3, 4]
    learner.durable(5)
    train(talk, worker, learner, 5)
    assert list(recorder.steps) == [2, 3, 4, 5]
    grown = summary(talk)
    assert grown["staleness"]["tokens_by_age"]["0"] > whole["staleness"]["tokens_by_age"]["0"]
    talk.restart_broker()
    talk.service.close(talk.now)
    again, figures = summary(talk), ("reward", "staleness")
    assert list(talk.service.recorder.steps) == [2, 3, 4, 5] and talk.service.recorder.newest == recorder.newest
    assert [again[figure] for figure in figures] == [grown[figure] for figure in figures]
    assert sum(again["staleness"]["tokens_by_age"].values()) == again["tokens"]["trained"]
