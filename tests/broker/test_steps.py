"""The broker's record of trained steps, and its estimate of the remaining time."""

import orjson
import pytest

from april import wire
from april.broker.telemetry.recorder import Recorder
from tests.support.broker_conversation import FakeLearner, FakeWorker, joined, make_batch, metrics_lines, train

MAX_STEPS = 8


@pytest.fixture
def talk(converse):
    return converse("--evaluation.prompts", "1", "--schedule.max_steps", str(MAX_STEPS))


def eta_s(talk):
    return talk.status()["eta_s"]


def summary(talk):
    talk.tick(1.0)
    return orjson.loads((talk.config.run_dir / "summary.json").read_bytes())


def test_the_estimated_time_left_uses_steps_since_the_broker_started(talk, worker, learner):
    for step in range(3):
        talk.tick(4.0)
        train(talk, worker, learner, step)
    assert eta_s(talk) == 4.0 * (MAX_STEPS - 3)
    talk.now += 3600.0
    talk.restart_broker()
    learner, worker = joined(FakeLearner(talk), step=3), joined(FakeWorker(talk), step=3)
    for step in (3, 4):
        assert eta_s(talk) is None
        talk.tick(8.0)
        train(talk, worker, learner, step)
    assert eta_s(talk) == 8.0 * (MAX_STEPS - 5)


def test_a_step_unknown_to_the_journal_has_no_line_and_is_no_replay(talk, worker, learner):
    """The broker dies between the learner's `Consumed` and the journal's sync."""
    train(talk, worker, learner, 0)
    make_batch(worker)
    learner.fetch(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(talk, "deliver", lambda: None)
        learner.say(wire.Consumed(1, {"loss": 0.5}, ""))
    assert talk.ledger.steps.frontier == 2
    lines = metrics_lines(talk)
    die_unsynced(talk)
    talk.start()
    assert metrics_lines(talk) == lines and [line["step"] for line in lines] == [1]
    learner, worker = FakeLearner(talk), FakeWorker(talk)
    learner.join(step=1)
    learner.fetch(1)
    learner.consume(1)
    assert [line["step"] for line in metrics_lines(talk)] == [1, 2]
    assert summary(talk)["replays"] == {"same": 0, "different": 0}


def die_unsynced(talk):
    talk.journal.fail(OSError("killed"))
    talk.journal.close()
    talk.peers = {}


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


def test_a_start_reads_what_a_learner_can_go_back_to_and_sums_the_rest_the_same(talk, worker, learner, monkeypatch):
    for step in range(7):
        talk.tick(0.5)
        train(talk, worker, learner, step)
        learner.durable(step + 1)
    steps, path = list(talk.service.recorder.steps), talk.config.run_dir / "metrics.past"
    whole, seen, told = path.read_bytes(), [], []
    monkeypatch.setattr(Recorder, "_remember", remembering(Recorder._remember, seen))
    for past, lines in ((whole, steps), (b"", range(7)), (whole[:-9], range(7)), (changed(whole), range(7))):
        path.write_bytes(past)
        seen.clear()
        talk.restart_broker()
        assert seen == list(lines) and list(talk.service.recorder.steps)[-3:] == steps[-3:]
        talk.service.stop("asked", "stopped", talk.now)
        after = summary(talk)
        told.append([after[figure] for figure in ("reward", "staleness", "rollout_tokens_per_s", "gradient", "steps")])
    assert len(steps) < 7 and after["rollout_tokens_per_s"] > 0
    assert all(again == told[0] for again in told)


def remembering(remember, seen):
    def note(recorder, record, *rest):
        seen.append(record["step"] - 1)
        remember(recorder, record, *rest)

    return note


def changed(past):
    """Content of metrics.past with another checksum of the last line that it sums up, as if metrics.jsonl had changed
    there."""
    return orjson.dumps(orjson.loads(past) | {"last_checksum": 1})
