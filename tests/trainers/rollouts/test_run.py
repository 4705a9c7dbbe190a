"""`april.connect` for external trainers: batches, their order, and defaults of omitted calls."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

import april
from april.config import ConfigError, load
from april.config.training import AlgorithmSection
from april.learner.batch import TrainingBatch
from april.observe.report.samples import read_step
from april.trainers.rollouts import Prompt, PromptsWanted
from april.trainers.rollouts.batch import to_tensors
from april.trainers.rollouts.run import Rollouts
from april.trainers.rollouts.weights import canary_from_model, collect
from tests.support.kill_broker import kill_broker
from tests.support.recording_broker import RecordingBroker, batch_of
from tests.support.run_processes import assert_closed

GRPO = AlgorithmSection()
WEIGHTS = {"weight": torch.ones(2)}


@pytest.fixture
def config(config_file):
    return load(config_file)


def test_a_batch_has_the_version_and_log_probability_of_each_token(config):
    batch = to_tensors(batch_of(7), GRPO)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]
    assert batch.attention_mask.sum(1).tolist() == [5, 3]
    assert batch.response_mask.tolist() == [[False, False, True, False, True], [False, False, True, False, False]]
    assert batch.versions.tolist() == [[-1, -1, 3, -1, 4], [-1, -1, 4, -1, -1]]
    assert batch.logprobs.tolist() == [[0, 0, -1, 0, -3], [0, 0, -1, 0, 0]]
    assert batch.rewards.tolist() == [1, 0] and batch.group.tolist() == [0, 0]
    assert batch.advantages[0] > 0 > batch.advantages[1]
    assert (batch.step, batch.checkpoint) == (7, 8)
    assert batch.prompts == [7] and batch.extras == ["mine"]


def test_each_batch_is_consumed_before_its_weights_are_published_and_durable_counts_the_checkpoint(config):
    broker = RecordingBroker(2)
    with Rollouts(config, 0, broker, broker) as run:
        run.publish(WEIGHTS)
        for batch in run.batches():
            run.consumed(batch, {"loss": 1.0})
            run.publish(WEIGHTS)
            run.durable(batch, oldest=batch.step)
    in_order = [calls for calls in broker.calls if calls[0] != "durable"]
    assert in_order == [
        ("start", 0), ("publish", 0), ("consumed", 0), ("publish", 1), ("consumed", 1), ("publish", 2)
    ]  # fmt: skip
    assert [calls for calls in broker.calls if calls[0] == "durable"] == [("durable", 1, 0), ("durable", 2, 1)]


def test_taking_the_next_batch_reports_the_last_one_as_consumed(config):
    broker = RecordingBroker(2)
    with Rollouts(config, 0, broker, broker) as run:
        run.publish(WEIGHTS)
        for _ in run.batches():
            run.publish(WEIGHTS)
    assert [calls for calls in broker.calls if calls[0] == "consumed"] == [("consumed", 0), ("consumed", 1)]


def test_a_trainer_s_samples_and_metrics_are_stored_as_the_learner_s_are(config, monkeypatch):
    monkeypatch.setattr("april.learner.samples.Tokenizer", lambda path: SimpleNamespace(decode=str))
    config.run_dir.mkdir(parents=True)
    broker = RecordingBroker(2)
    with Rollouts(config, 0, broker, broker) as run:
        run.publish(WEIGHTS)
        run.consumed(run.take(), {"loss": 0.5, "wait_s": 7.0})
        run.publish(WEIGHTS)
        run.consumed(run.take(), discarded="nonfinite")
        run.publish(WEIGHTS)
        assert run.take() is None
    metrics, _ = broker.metrics
    assert (metrics["loss"], metrics["wait_s"]) == (0.5, 7.0) and 0 <= metrics["train_s"] < 60
    assert metrics.items() >= {"tokens": 3, "trained_tokens": 3, "groups": 1, "gradient_groups": 1}.items()
    trained, skipped = read_step(config.run_dir, 1), read_step(config.run_dir, 2)
    assert [(row["reward"], row["trained"], row["response_ids"]) for row in trained] == [
        (1.0, True, [7, 8, 9]), (0.0, True, [7])
    ]  # fmt: skip
    assert trained[0]["advantage"] > 0 > trained[1]["advantage"] and trained[0]["learner_logprobs"] is None
    assert {(row["discarded"], row["trained"]) for row in skipped} == {("nonfinite", False)}


def test_weights_of_repeated_batches_are_not_sent(config):
    broker = RecordingBroker(4, frontier=3)
    with Rollouts(config, 1, broker, broker) as run:
        for _ in run.batches():
            run.publish(WEIGHTS)
    assert [calls[1] for calls in broker.calls if calls[0] == "publish"] == [3, 4]


def test_taking_a_batch_without_publishing_weights_is_an_error(config):
    broker = RecordingBroker(2)
    with Rollouts(config, 0, broker, broker) as run:
        with pytest.raises(RuntimeError, match=r"weights 0 .*run\.publish"):
            next(run.batches())
        run.publish(WEIGHTS)
        batches = run.batches()
        next(batches)
        with pytest.raises(RuntimeError, match=r"weights 1 .*run\.publish"):
            next(batches)


@pytest.fixture
def submitted_run(config_file):
    """A run with submitted prompts, and the broker that records its calls."""
    broker = RecordingBroker(2)
    return broker, Rollouts(load(config_file, ["--data.source", "submitted"]), 0, broker, broker)


def test_prompts_are_texts_messages_or_ids_and_submitted_ones_are_skipped(submitted_run):
    broker, run = submitted_run
    assert run.submit(["05*3", [4, 5], Prompt([6], label="1", extra={"uid": np.int64(3)})]) == 3
    assert run.submit([[4], [5], [6], [7]], first=1) == 5
    submits = [calls[1:] for calls in broker.calls if calls[0] == "submit"]
    assert submits[0] == (0, [], []), "how many there are is asked at the start"
    assert submits[1][:2] == (0, [4, 2, 1]) and submits[1][2][4:] == [4, 5, 6]
    assert submits[2] == (3, [1, 1], [6, 7])
    with pytest.raises(ValueError, match=r"prompt 9 .*5"):
        run.submit([[1]], first=9)
    for wrong, why in (([], "0 tokens"), ([1] * 9999, "9999 tokens"), (Prompt([1], "x" * 200_000), "more than")):
        with pytest.raises(ValueError, match=why):
            run.submit([wrong])


def test_many_prompts_go_in_as_many_messages_as_hold_them(submitted_run, monkeypatch):
    broker, run = submitted_run
    monkeypatch.setattr("april.trainers.rollouts.prompts.MAX_MESSAGE_TOKENS", 3)
    assert run.submit([[1, 2], [3, 4], [5]]) == 3
    assert [calls[1:] for calls in broker.calls[-2:]] == [(0, [2], [1, 2]), (1, [2, 1], [3, 4, 5])]


def test_taking_a_batch_without_enough_prompts_raises_prompts_wanted(submitted_run):
    broker, run = submitted_run
    run.publish(WEIGHTS)
    broker.fetch = lambda step: TrainingBatch(step, [])
    with pytest.raises(PromptsWanted, match=r"submit more with run\.submit"):
        run.take()
    broker.fetch = batch_of
    assert run.take().prompts == [0]


@pytest.mark.full
def test_submitted_prompts_become_groups_though_the_broker_is_killed(config_file, policy_folder):
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    keys = {"data.source": "submitted", "evaluation.prompts": 1, "worker.slots": 16}
    taken = []
    with april.connect(config_file, overrides=keys) as run:
        run.publish(model)
        run.submit(numbered(0, 6))
        for step in range(3):
            batch = run.take()
            taken += batch.prompts
            assert [extra["row"] for extra in batch.extras] == batch.prompts and len(batch.prompts) == 4
            run.consumed(batch)
            if step == 0:
                kill_broker(run)
            run.submit(numbered(6 + 4 * step, 4), first=6 + 4 * step)
            assert run.submitted == 10 + 4 * step
            run.publish(model)
        assert run.take() is None
    assert len(set(taken)) == 12 and assert_closed(run.config.run_dir)["state"] == "finished"


def numbered(first, count):
    return [Prompt(f"{row % 64:02d}*3+60=", str(row % 2), extra={"row": row}) for row in range(first, first + count)]


def test_a_model_its_state_and_its_tensors_are_the_same_weights_and_tied_ones_come_once(policy_folder, config):
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    wrapped = torch.nn.Module()
    wrapped.module = model
    expected = dict(model.named_parameters())
    for weights in (model, wrapped, model.state_dict(), iter(model.state_dict().items())):
        collected = collect(weights)
        assert collected.keys() == expected.keys()
        assert all(torch.equal(collected[name], expected[name]) for name in expected)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert not torch.equal(collected[next(iter(expected))], next(model.parameters())), "what is sent stays as it was"
    assert canary_from_model(model, config).dtype == "float32" and canary_from_model(model.state_dict(), config) is None


@pytest.mark.full
def test_connect_raises_what_the_run_refuses(config_file, tmp_path):
    (tmp_path / "bad.jsonl").write_text("not json\n")
    with pytest.raises(ConfigError, match="line 1"):
        april.connect(config_file, overrides={"data.path": str(tmp_path / "bad.jsonl")})
    with pytest.raises(ConfigError, match=r"tcp://HOST:PORT"):
        april.connect(config_file, run="nowhere")
    (tmp_path / "runs" / "small").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"'run\.name' = 'small' .*no journal"):
        april.connect(config_file)


@pytest.mark.full
def test_the_package_is_imported_without_torch():
    asked = "import sys, april; print('torch' in sys.modules); april.connect; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.full
def test_under_torchrun_each_rank_gets_the_batch_and_sharded_weights_are_sent_whole(start, config_file, tmp_path):
    launch = [sys.executable, "-m", "april.learner.launch", "--nproc-per-node=2"]
    job = start("log", [*launch, "-m", "tests.trainers.rollouts.publishing_ranks", str(config_file), str(tmp_path)])
    assert job.wait() == 0, job.output
    seen = orjson.loads((tmp_path / "seen.json").read_bytes())
    of_first, of_second = seen["ranks"]
    assert of_first == of_second == [[step, *to_tensors(batch_of(step), GRPO).input_ids.tolist()] for step in (0, 1)]
    assert seen["said"] == [["start", 0], ["consumed", 0], ["publish", 1], ["consumed", 1], ["publish", 2]]
    assert seen["shapes"] == {"weight": [4, 3], "bias": [4]}
