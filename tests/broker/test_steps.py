"""The broker's record of trained steps, and its estimate of the remaining time."""

import orjson
import pytest

from april import wire
from april.broker.journal.files import JournalError
from april.broker.recovery import last_step
from april.broker.telemetry.recorder import Recorder
from tests.support.broker_conversation import FakeLearner, FakeWorker, joined, make_batch, metrics_lines, train
from tests.support.marks import full

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


def test_the_phase_says_which_steps_are_trained_again_after_a_restart(talk, worker, learner):
    for step in range(3):
        train(talk, worker, learner, step)
    talk.restart_broker()
    joined(FakeLearner(talk), step=1)
    assert talk.status()["phase"].endswith("training again, up to step 3")


def test_no_time_is_foretold_for_steps_that_the_prompts_do_not_reach(converse):
    talk = converse("--evaluation.prompts", "1", "--schedule.max_steps", "1000", "--data.epochs", "1")
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk))
    for step in range(2):
        talk.tick(4.0)
        train(talk, worker, learner, step)
    undrawn = talk.service.context.prompts.remaining(talk.ledger.prompts.next)
    reached = (len(talk.ledger.groups) + undrawn) // talk.config.schedule.rollout_batch_size
    assert 0 < eta_s(talk) == 4.0 * reached < 4.0 * 100


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


@pytest.mark.parametrize("lost", [[2], [3], [1, 2, 3]])
def test_lines_that_metrics_jsonl_lacks_are_restored_from_the_journal(talk, worker, learner, lost):
    """A broker that is killed behind the journal's sync has not written the line yet; any line may be damaged later."""
    for step in range(2):
        train(talk, worker, learner, step, grad_norm=7.0 + step)
    with pytest.MonkeyPatch.context() as patch:
        if lost == [3]:
            patch.setattr(talk.service.recorder.metrics_file, "write", lambda: None)
        train(talk, worker, learner, 2, grad_norm=9.0)
        waiting = bytes(talk.service.recorder.metrics_file._waiting)
    path = talk.config.run_dir / "metrics.jsonl"
    whole = path.read_bytes() + waiting
    kept = [line for line in whole.splitlines(keepends=True) if orjson.loads(line)["step"] not in lost]
    path.write_bytes(b"".join(kept))
    talk.restart_broker()
    assert path.read_bytes() == whole
    assert list(talk.service.recorder.steps) == [0, 1, 2]
    learner = FakeLearner(talk, learner.name)
    learner.hello()
    learner.consume(2, grad_norm=9.0)
    assert path.read_bytes() == whole
    learner.durable(3)
    assert not talk.ledger.recorded


@pytest.mark.parametrize("who", ["the learner", "its successor"])
def test_a_repeated_report_brings_the_line_that_a_killed_broker_could_not_journal(talk, worker, learner, who):
    """The journal ends between `BatchConsumed` and `StepRecorded`, which no sync has to put on disk together."""
    train(talk, worker, learner, 0)
    make_batch(worker)
    learner.fetch(1)
    talk.ledger.consume(1)
    talk.deliver()
    talk.restart_broker()
    assert [line["step"] for line in metrics_lines(talk)] == [1]
    if who == "the learner":
        learner = FakeLearner(talk, learner.name)
        learner.hello()
        learner.consume(1, grad_norm=9.0)
    else:
        FakeLearner(talk).join(step=2)
    lines = metrics_lines(talk)
    assert [line["step"] for line in lines] == [1, 2] and ("grad_norm" in lines[1]["learner"]) == (who == "the learner")


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


# --- files that are damaged -------------------------------------------------------------------------------------------


GARBAGE = {
    "no json": b"\x00garbage\xff\n", "blank": b"\n", "a list": b"[]\n", "a number": b"7\n", "no step": b'{"a": 1}\n',
    "a step that is a word": b'{"step": "x"}\n', "half a record": b'{"step":1,"time":0.0}\n', "torn": None,
}  # fmt: skip


@pytest.mark.parametrize("place", [1, full(0), full(3)])
@pytest.mark.parametrize("kind", GARBAGE)
def test_a_bad_line_of_metrics_is_set_aside_at_a_start_and_costs_no_other(talk, worker, learner, kind, place, caplog):
    for step in range(3):
        train(talk, worker, learner, step)
    path = talk.config.run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    bad = lines[1][:40] if kind == "torn" else GARBAGE[kind]
    if kind == "torn" and place == 3:
        bad += b"\n"
    path.write_bytes(b"".join([*lines[:place], bad, *lines[place:]]))
    assert last_step(path) == 3
    talk.restart_broker()
    assert path.read_bytes() == b"".join(lines) and [line["step"] for line in metrics_lines(talk)][-3:] == [1, 2, 3]
    assert path.with_name("metrics.bad").read_bytes() == bad.removesuffix(b"\n") + b"\n"
    assert "1 lines are no records" in caplog.text
    assert list(talk.service.recorder.steps) == [0, 1, 2] and talk.service.recorder.sums.rollout_tokens > 0


@pytest.mark.parametrize(
    "summary",
    [
        b"[]", b"", b"null", b"\xff", b'{"tokens": [], "replays": 3}', b'{"buffer_peak": {"tokens": "x"}}',
        b'{"wall_s": null}',
    ],
)  # fmt: skip
def test_a_damaged_summary_is_written_anew(talk, worker, learner, summary):
    train(talk, worker, learner, 0)
    path = talk.config.run_dir / "summary.json"
    path.write_bytes(summary)
    talk.restart_broker()
    talk.service.close(talk.now)
    again = orjson.loads(path.read_bytes())
    assert again["steps"] == 1 and again["ledger_closed"]


@pytest.mark.parametrize("figures", [{"last_bytes": 10**9}, {"offset": 10**12}, {"offset": -1}, {"last_bytes": -5}])
def test_sums_of_places_outside_their_file_are_made_anew(talk, worker, learner, figures):
    for step in range(7):
        train(talk, worker, learner, step)
        learner.durable(step + 1)
    path = talk.config.run_dir / "metrics.past"
    whole, sums = orjson.loads(path.read_bytes()), talk.service.recorder.sums
    path.write_bytes(orjson.dumps(whole | figures))
    talk.restart_broker()
    assert talk.service.recorder.sums.rollout_tokens == sums.rollout_tokens


def test_stray_files_in_the_journal_s_folder_are_left_alone(talk, worker, learner, caplog):
    train(talk, worker, learner, 0)
    folder = talk.journal.folder
    names = ["copy of 0.msgpack", "x.msgpack", "12.msgpack", "9.snapshot", "x.snapshot", "notes.txt"]
    for name in names:
        (folder / name).write_bytes(b"stray")
    talk.restart_broker()
    assert talk.ledger.steps.frontier == 1 and all((folder / name).read_bytes() == b"stray" for name in names)
    assert "12.msgpack is no file of the journal" in caplog.text


def test_two_files_with_the_same_positions_are_refused(talk, worker, learner):
    train(talk, worker, learner, 0)
    (talk.journal.folder / f"{100:020d}.msgpack").write_bytes(b"")
    with pytest.raises(JournalError, match=r"position 100 .*two files"):
        talk.restart_broker()
