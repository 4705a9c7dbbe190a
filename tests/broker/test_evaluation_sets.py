"""Several sets of held-out prompts: each is drawn and scored by its own keys and reported under its name, and one of
them decides on the best checkpoint."""

import orjson
import pytest

from april import config as configuration
from april import wire
from april.broker.journal.files import JournalError
from april.broker.telemetry.evaluation import describe_evaluation
from april.broker.telemetry.sinks import evaluation_metrics
from april.observe.report.run_folder import read_run
from april.util.versions import RUN_FOLDER
from tests.support.broker_conversation import Conversation, FakeLearner, FakeWorker, joined, train

SETS = """
[evaluation]
prompts = 2
every = 1
share = 1.0
best = "hard"
{sets}
"""
HARD = """
[evaluation.sets.hard]
path = "hard.jsonl"
prompts = 3
samples = 2
temperature = 0.5
reward = "exact"
"""
EASY = """
[evaluation.sets.easy]
path = "hard.jsonl"
prompts = 1
temperature = 0.0
"""


@pytest.fixture
def load(config_file):
    """Factory: load(sets) -> configuration of the small run with these evaluation sets in addition to
    `data.eval_path`."""
    rows = [{"prompt": f"{row:02d}*3+60=", "label": str(row)} for row in range(5)]
    (config_file.parent / "hard.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    small = config_file.read_text().replace("evaluation = { prompts = 8 }\n", "")

    def load(sets=HARD + EASY, overrides=()):
        config_file.write_text(small + SETS.format(sets=sets))
        return configuration.load(config_file, ["--schedule.max_steps", "6", *overrides])

    return load


def evaluation_grants(worker):
    """Evaluation grants by the number of their set; training grants are given back."""
    found = {}
    for grant in worker.grants():
        if grant.evaluation:
            found.setdefault(worker.conversation.ledger.groups[grant.group].epoch, []).append(grant)
        else:
            worker.report(closings=[wire.GiveBack(grant.lease_id, 0, "abort")])
    return found


def test_each_set_has_its_prompts_its_samples_and_its_verifier(load):
    talk = Conversation(load())
    worker = joined(FakeWorker(talk), capacity=64)
    grants = evaluation_grants(worker)
    assert {number: len(of_set) for number, of_set in grants.items()} == {0: 2, 1: 6, 2: 1}
    drawn = {number: {(grant.temperature, grant.reward) for grant in of_set} for number, of_set in grants.items()}
    default = talk.config.reward.name
    assert drawn == {0: {(1.0, default)}, 1: {(0.5, "exact")}, 2: {(0.0, default)}}
    assert sorted({grant.label for grant in grants[1]}) == ["0", "1", "2"]


def test_results_are_stored_by_name_and_survive_a_broker_that_dies_between_the_sets(load):
    talk = Conversation(load())
    worker = joined(FakeWorker(talk), capacity=64)
    grants = evaluation_grants(worker)
    for grant in grants[0]:
        worker.complete(grant, reward=1.0, correct=1.0)
    for turn, grant in enumerate(grants[1][:4]):
        worker.complete(grant, reward=2.0, correct=float(turn == 0))
    assert not talk.ledger.evaluated
    talk.restart_broker()
    talk.tick(talk.config.broker.readopt_s + 1)
    worker = joined(FakeWorker(talk), capacity=64)
    rest = evaluation_grants(worker)
    assert {number: len(of_set) for number, of_set in rest.items()} == {1: 2, 2: 1}
    for grant in rest[1] + rest[2]:
        worker.complete(grant, reward=0.0, correct=0.0)
    result = talk.ledger.evaluated[0]
    found = {name: (one["accuracy"], one["prompts"]) for name, one in result["sets"].items()}
    assert found == {"heldout": (1.0, 2), "hard": (pytest.approx(1 / 6, abs=1e-6), 3), "easy": (0.0, 1)}
    assert result["accuracy"] == 1.0 and list(result["sets"]["hard"]["pass_at_k"]) == ["1", "2"]
    said = "heldout accuracy 1.000 on 2 prompts; hard accuracy 0.167 on 3 prompts; easy accuracy 0.000 on 1 prompts"
    assert describe_evaluation(result) == f"evaluation at step 0: {said}"
    figures = evaluation_metrics(result)
    assert figures["evaluation/accuracy"] == 1.0 and figures["evaluation/sets/easy/accuracy"] == 0.0
    lines = (talk.config.run_dir / "metrics.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["evaluation"]["sets"] for line in lines] == [result["sets"]]


def answer(learner):
    learner.say(wire.BestRequest())
    message = learner.take(wire.BestCheckpoint)[-1].message
    return message.step, message.undecided


def evaluate(worker, accuracy):
    """Complete all evaluation samples; of the 6 samples of the set `hard`, the share `accuracy` gets reward 1."""
    grants = evaluation_grants(worker)
    for number, of_set in grants.items():
        for turn, grant in enumerate(of_set):
            worker.complete(grant, reward=float(number != 1 or turn < accuracy * 6))


def test_the_best_weights_are_those_of_the_chosen_set_and_are_known_after_a_restart(load):
    talk = Conversation(load())
    learner, worker = joined(FakeLearner(talk)), joined(FakeWorker(talk), capacity=64)
    evaluate(worker, 1.0)
    assert answer(learner) == (-1, []), "the starting weights have no checkpoint"
    found = []
    for step, accuracy in enumerate((1 / 6, 4 / 6, 2 / 6)):
        train(talk, worker, learner, step)
        found.append(answer(learner))
        evaluate(worker, accuracy)
        found.append(answer(learner))
    assert found == [(-1, [1]), (1, []), (1, [2]), (2, []), (2, [3]), (2, [])]
    talk.restart_broker()
    learner = joined(FakeLearner(talk), step=3)
    assert answer(learner) == (2, [])


def test_the_sets_stay_those_that_a_run_was_begun_with(load):
    talk = Conversation(load())
    for sets in (HARD, EASY + HARD, HARD + EASY.replace("prompts = 1", "prompts = 2")):
        talk.config = load(sets)
        with pytest.raises(JournalError, match=r"evaluation.sets"):
            talk.restart_broker()
        talk.journal.close()


@pytest.mark.parametrize(
    "sets, overrides, refusal",
    [
        (HARD, ["--evaluation.every", "0"], "evaluation.every = 0"),
        (EASY, [], "evaluation.best' = 'hard'"),
        (HARD.replace("hard.jsonl", "gone.jsonl"), [], "evaluation.sets.hard.path"),
        (HARD.replace("0.5", "0.0"), [], "evaluation.sets.hard.samples"),
        (HARD + EASY.replace("easy", '"a/b"'), [], "evaluation.sets.*letters"),
        (HARD + EASY.replace("easy", "heldout"), [], "evaluation.sets.*heldout"),
        (HARD, ["--evaluation.sets.hard.sample", "3"], "unknown key 'evaluation.sets.hard.sample'"),
    ],
)
def test_invalid_sets_are_refused(load, sets, overrides, refusal):
    with pytest.raises(configuration.ConfigError, match=refusal):
        load(sets, overrides)


def test_a_report_has_each_set_by_name(load):
    talk = Conversation(load())
    worker = joined(FakeWorker(talk), capacity=64)
    evaluate(worker, 0.5)
    talk.service._write_summary(talk.now)
    run_dir = talk.config.run_dir
    (run_dir / "config.toml").write_text(talk.config.to_toml())
    RUN_FOLDER.claim(run_dir, new=True)
    named = read_run(run_dir).named_evaluations
    assert {name: [point["reward"] for point in points] for name, points in named.items()} == {
        "heldout": [1.0], "hard": [0.5], "easy": [1.0]
    }  # fmt: skip
