"""AReaL's trainer on April's rollouts: a run answers its calls of an inference engine, its options keep their names."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from april.config import ConfigError, load
from april.learner.batch import TrainingBatch
from april.trainers.rollouts.run import Rollouts
from tests.support import areal_types
from tests.support.kill_broker import kill_broker
from tests.support.recording_broker import RecordingBroker, batch_of
from tests.support.run_processes import assert_closed

SMALL = ["--schedule.max_steps", "2"]
WEIGHTS = {"a": torch.ones(2), "b": torch.zeros(3)}


@pytest.fixture
def areal(monkeypatch):
    """The adapter, where AReaL would be installed."""
    areal_types.install(monkeypatch)
    monkeypatch.setattr(areal_types.PPOTrainer, "weights", lambda self: WEIGHTS)
    monkeypatch.delitem(sys.modules, "april.trainers.adapters.areal", raising=False)
    yield importlib.import_module("april.trainers.adapters.areal")
    sys.modules.pop("april.trainers.adapters.areal", None)


def options(config, folder, **more):
    """AReaL's, fitting the run."""
    schedule, temperature = config.schedule, config.sampling.temperature
    return SimpleNamespace(
        actor=SimpleNamespace(
            path=str(config.model.path), temperature=temperature, weight_update_mode="disk", use_lora=False,
            _version="v1",
        ),
        gconfig=SimpleNamespace(
            n_samples=schedule.n_samples_per_prompt, temperature=temperature,
            max_new_tokens=config.sampling.max_response_tokens,
        ),
        train_dataset=SimpleNamespace(batch_size=schedule.rollout_batch_size), rollout=None, dynamic_bs=False,
        total_train_epochs=1, total_train_steps=None,
        recover=SimpleNamespace(mode="auto", experiment_name="e", trial_name="t", fileroot=str(folder), steps=[0]),
    )  # fmt: skip


@pytest.fixture
def trainer_on(areal, monkeypatch, config_file, tmp_path):
    """AReaL's trainer on books; `words`: the run's keys."""

    def make(broker, *words, **keys):
        config = load(config_file, [*SMALL, *words])
        broker.start(0)
        monkeypatch.setattr(areal.rollouts, "connect", lambda path, step, *_: Rollouts(config, step, broker, broker))
        return areal.ArealTrainer(config_file, options(config, tmp_path), **keys)

    return make


def test_a_step_of_areal_s_is_a_batch_and_its_weights_are_the_next_version(trainer_on, config_file, tmp_path):
    broker = RecordingBroker(2)
    group = batch_of(0).groups[0]
    broker.fetch = lambda step: TrainingBatch(step, [group[:1], group], []) if step < 2 else None
    with trainer_on(broker) as trainer:
        trainer.train()
        lost, whole = trainer.actor.seen[0]
    assert whole["input_ids"].tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]
    assert whole["attention_mask"].tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert whole["versions"].tolist() == [[-1, -1, 3, -1, 4], [-1, -1, 4, -1, -1]]
    assert whole["rewards"].tolist() == [1.0, 0.0] and whole["input_ids"].dtype == torch.int32
    mask, logprobs = areal_types.rolled(whole)
    assert mask.tolist() == [[0, 1, 0, 1, 0], [0, 1, 0, 0, 0]]
    assert logprobs[0].tolist() == [0, -1, 0, -3, 0]
    assert lost["rewards"].tolist() == [1.0, 1.0], "a group that has lost a sample has another one twice"
    calls = [calls for calls in broker.calls if calls[0] != "start"]
    order = ["publish 0", "consumed 0", "publish 1", "durable 1 1", "consumed 1", "publish 2"]
    assert [" ".join(map(str, one)) for one in calls] == order
    assert broker.weights[2].keys() == WEIGHTS.keys() and not list(tmp_path.glob("weight_update*"))


def test_areal_s_rows_are_prompts_and_its_checkpoint_knows_which_were_drawn(trainer_on, areal, tmp_path):
    rows = [{"messages": [number + 5, 6], "answer": str(number)} for number in range(8)]
    submitted = ["--data.source", "submitted", "--schedule.over_sampling_batch_size", "6"]
    broker = RecordingBroker(2)
    broker.fetch = lambda step: TrainingBatch(step, batch_of(0).groups * 4, [(place, b"") for place in range(4)])
    trainer = trainer_on(broker, *submitted, train_dataset=rows)
    trainer.actor.prepare_batch(trainer.train_dataloader, None)
    submitted_run = [calls for calls in broker.calls if calls[0] == "submit" and calls[2]]
    assert submitted_run[:2] == [
        ("submit", 0, [2] * 4, [5, 6, 6, 6, 7, 6, 8, 6]),
        ("submit", 4, [2] * 4, [9, 6, 10, 6, 11, 6, 12, 6]),
    ]
    state = trainer.train_dataloader.state_dict()
    again = areal.CountingLoader(areal_types.Loader(rows, 4))
    again.load_state_dict(state)
    assert again.draw() == (8, rows[:4]), "the second pass over the rows"
    trainer.close()
    with pytest.raises(ConfigError, match="give train_dataset"):
        trainer_on(RecordingBroker(2), *submitted)


def test_options_that_do_not_fit_the_run_are_refused_by_areal_s_own_names(areal, config_file, tmp_path, monkeypatch):
    config = load(config_file)
    areal.check(config, options(config, tmp_path))
    for section, name, value in (
        ("gconfig", "n_samples", 17), ("train_dataset", "batch_size", 17), ("actor", "weight_update_mode", "xccl"),
        ("actor", "use_lora", True),
    ):  # fmt: skip
        theirs = options(config, tmp_path)
        setattr(getattr(theirs, section), name, value)
        with pytest.raises(ConfigError, match=rf"AReaL's '{section}\.{name}' = {value!r} "):
            areal.check(config, theirs)
    monkeypatch.setenv("AREAL_SPMD_MODE", "1")
    with pytest.raises(ConfigError, match=r"start AReaL with scheduler\.type=local"):
        areal.check(config, options(config, tmp_path))


def test_another_number_of_steps_and_a_run_at_another_step_are_refused(trainer_on, monkeypatch):
    trainer = trainer_on(RecordingBroker(2))
    trainer.config.total_train_steps = 1
    with pytest.raises(ConfigError, match=r"1 steps .*run 2"):
        trainer.train()
    with pytest.raises(RuntimeError, match=r"version 1 .*run at 0"):
        trainer.rollout.set_version(1)
    trainer.close()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_areal_s_rows_are_generated_for_and_batches_come_again_though_it_and_its_broker_are_killed(
    areal, monkeypatch, config_file, policy_folder, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    monkeypatch.setattr(areal_types.PPOTrainer, "weights", lambda self: weights)
    keys = {"data.source": "submitted", "evaluation.prompts": 1, "schedule.max_steps": 3}
    config = load(config_file, [word for key, value in keys.items() for word in (f"--{key}", str(value))])
    rows = [{"messages": f"{number:02d}*3+60=", "answer": str(number % 2)} for number in range(12)]

    def calls(version):
        """The broker dies before it has heard of the first step, AReaL before the second is in its weights."""
        if version == 2:
            raise KeyboardInterrupt
        kill_broker(trainer.rollout.run)
        set_version(version)

    def taken(**wanted):
        """The broker dies before it is asked for the batch once more."""
        again.rollout.prepare_batch = prepare_batch
        kill_broker(again.rollout.run)
        return prepare_batch(**wanted)

    seen = []
    with (
        pytest.raises(KeyboardInterrupt),
        areal.ArealTrainer(config_file, options(config, tmp_path), rows, overrides=keys) as trainer,
    ):
        seen, set_version = trainer.actor.seen, trainer.rollout.set_version
        trainer.rollout.set_version = calls
        trainer.train()
    with areal.ArealTrainer(config_file, options(config, tmp_path), rows, overrides=keys) as again:
        prepare_batch, again.rollout.prepare_batch = again.rollout.prepare_batch, taken
        again.train()
        assert again.start == 1 and len(again.actor.seen) == 2
    for first, second in zip(seen[1], again.actor.seen[0], strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first), "the same batch comes again"
    assert assert_closed(config.run_dir)["state"] == "finished"
