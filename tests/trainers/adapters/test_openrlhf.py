"""OpenRLHF's trainer on April's rollouts: a run answers its calls of an engine, its options keep their names."""

import asyncio
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from april.config import ConfigError, load
from april.learner.batch import TrainingBatch
from april.trainers.adapters import openrlhf as adapter
from april.trainers.adapters.openrlhf import check, their_options
from april.trainers.rollouts import aio
from april.trainers.rollouts.run import Rollouts
from tests.support.openrlhf_types import broadcast, experience, generate
from tests.support.recording_broker import RecordingBroker, batch_of
from tests.support.run_processes import assert_closed

SUBMITTED = ["--data.source", "submitted", "--schedule.over_sampling_batch_size", "4"]
FITTING = [
    "--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "2", "--rollout.max_new_tokens", "24",
    "--vllm.num_engines", "1", "--algo.advantage.is_correction_level", "token", "--actor.adam.lr", "1e-6",
]  # fmt: skip
PROMPTS = [(f"{number:02d}*3+60=", str(number)) for number in range(4)]
WEIGHTS = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.bfloat16)}


@pytest.fixture
def sent(monkeypatch):
    """What rank 0 broadcasts next, through Ray's collectives."""
    tensors = []
    collective = SimpleNamespace(
        init_collective_group=lambda world_size, rank, backend, group_name: tensors.clear(),
        broadcast=lambda tensor, src_rank, group_name: tensor.copy_(tensors.pop(0)),
    )
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace(collective=collective))
    return tensors


@pytest.fixture
def tokenizer(policy_folder):
    return AutoTokenizer.from_pretrained(policy_folder)


def engine_on(config, broker, folder):
    return adapter.OpenRlhfEngine(lambda: aio.AsyncRollouts(lambda: Rollouts(config, 0, broker, broker)), str(folder))


async def meet(engine):
    await engine.start()
    await engine.init_process_group("127.0.0.1", 1, 1, 2, "openrlhf", backend="gloo", use_ray=True)


def test_each_prompt_gets_its_own_group_in_openrlhf_s_format(config_file, tokenizer, sent, tmp_path):
    broker = RecordingBroker(3)
    group = batch_of(0).groups[0]
    broker.fetch = lambda step: TrainingBatch(
        step, [group[:1], group, group, group], [(place, b"") for place in (3, 0, 2, 1)]
    )
    engine = engine_on(load(config_file, SUBMITTED), broker, tmp_path)

    async def steps():
        await meet(engine)
        return await generate(engine, PROMPTS, tokenizer, 2)

    answers = asyncio.run(steps())
    assert [[one["prompt"] for one in group] for group in answers] == [[prompt] * 2 for prompt, _ in PROMPTS]
    assert [group[0]["label"] for group in answers] == ["0", "1", "2", "3"]
    found = experience(answers[0][0])
    assert found["sequences"].tolist() == [5, 6, 7, 8, 9] and found["action_mask"].tolist() == [0, 1, 0, 1]
    assert found["rollout_log_probs"].tolist() == [0, -1, -2, -3] and found["rewards"].tolist() == [1.0]
    assert answers[3][0] == answers[3][1], "a group that has lost a sample has another one twice"
    ids = [token for prompt, _ in PROMPTS for token in tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    assert ("submit", 0, [8] * 4, ids) in broker.calls


def test_weights_that_were_broadcast_are_published_once_they_are_whole(config_file, tokenizer, sent, tmp_path):
    broker = RecordingBroker(1)
    group = batch_of(0).groups[0]
    broker.fetch = lambda step: TrainingBatch(step, [group] * 4, []) if step < 1 else None
    config = load(config_file, ["--schedule.max_steps", "1"])
    engine = engine_on(config, broker, tmp_path / "none")

    async def steps():
        await meet(engine)
        first = await generate(engine, PROMPTS, tokenizer, 2)
        assert first[0][0]["prompt"] == tokenizer.decode([5, 6]), "the run's own prompts bring their text"
        await broadcast(engine, WEIGHTS, sent)
        with pytest.raises(RuntimeError, match="over after 1 batches"):
            await generate(engine, PROMPTS, tokenizer, 2)

    asyncio.run(steps())
    assert [calls for calls in broker.calls if calls[0] != "submit"][1:] == [
        ("publish", 0),
        ("consumed", 0),
        ("publish", 1),
    ]
    assert all(map(torch.equal, broker.weights[1].values(), WEIGHTS.values())) and broker.weights[1].keys() == {
        "a",
        "b",
    }


def test_too_few_prompts_are_an_error(config_file, tokenizer, sent, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter, "GATHER_TIMEOUT_S", 0.01)
    engine = engine_on(load(config_file, SUBMITTED), RecordingBroker(3), tmp_path)

    async def steps():
        await meet(engine)
        await generate(engine, PROMPTS[:3], tokenizer, 2)

    with pytest.raises(RuntimeError, match=r"3 prompts .*batch has 4"):
        asyncio.run(steps())


def test_options_that_do_not_fit_the_run_are_refused_by_openrlhf_s_own_names(config_file):
    config = load(config_file)
    fitting = [*FITTING, "--actor.model_name_or_path", str(config.model.path)]
    check(config, their_options(fitting))
    for name, value in (("rollout.batch_size", "17"), ("vllm.num_engines", "2"), ("eval.dataset", "held-out")):
        with pytest.raises(ConfigError, match=f"OpenRLHF's '--{name}' = "):
            check(config, their_options([*fitting, f"--{name}", value]))
    with pytest.raises(ConfigError, match=r"OpenRLHF's '--train\.async_enable' = True "):
        check(config, their_options([*fitting, "--train.async_enable"]))
    with pytest.raises(ConfigError, match=r"'data\.source' = 'submitted' .*OpenRLHF"):
        check(load(config_file, ["--data.source", "submitted"]), their_options(fitting))


def test_the_launcher_runs_openrlhf_s_own_command_with_april_for_an_engine(config_file, monkeypatch, tmp_path):
    config = load(config_file)
    package = tmp_path / "site/openrlhf"
    for folder in ("cli", "trainer/ray"):
        (package / folder).mkdir(parents=True)
    for folder in ("", "cli", "trainer", "trainer/ray"):
        (package / folder / "__init__.py").write_text("")
    (package / "cli/train_ppo_ray.py").write_text(
        "import sys\nfrom openrlhf.trainer.ray import create_vllm_engines\n"
        "sys.said = sys.argv[1:], create_vllm_engines(1, 1, 'model', 0)\n"
    )
    made = SimpleNamespace(start=SimpleNamespace(remote=lambda: None))
    actors = []

    def remote(engine):
        return SimpleNamespace(
            options=lambda **of: SimpleNamespace(remote=lambda *given: actors.append((engine, of, given)) or made)
        )

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(remote=remote, get=lambda one: one))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "argv", ["adapter"])
    theirs = [*FITTING, "--actor.model_name_or_path", str(config.model.path), "--ckpt.path", str(tmp_path)]
    (tmp_path / "_actor").mkdir()
    (tmp_path / "_actor/latest").write_text("global_step2")
    adapter.main(["--april.config", str(config_file), *theirs, "--ckpt.load_enable"])
    words, engines = sys.said
    assert words[: len(theirs)] == theirs and words[-2] == "--train.agent_func_path" and engines == [made]
    [(engine, of, (connect, checkpoints))] = actors
    assert engine is adapter.OpenRlhfEngine and of["num_gpus"] == 1 and of["max_concurrency"] > 4
    assert connect.args == (str(config_file), 2, "local") and checkpoints == str(tmp_path / "_actor")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_openrlhf_s_prompts_are_generated_for_and_come_again_from_its_checkpoint(
    config_file, policy_folder, tokenizer, sent, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    overrides = {"data.source": "submitted", "schedule.over_sampling_batch_size": 4, "evaluation.prompts": 1}

    async def train(checkpoint, steps):
        engine = adapter.OpenRlhfEngine(
            partial(aio.connect, config_file, checkpoint, overrides=overrides), str(tmp_path / "o")
        )
        await meet(engine)
        if checkpoint:
            await broadcast(engine, weights, sent)
        seen = []
        for step in range(checkpoint, checkpoint + steps):
            prompts = [(f"{4 * step + place:02d}*3+60=", str(place % 2)) for place in range(4)]
            seen.append(await generate(engine, prompts, tokenizer, 2))
            assert [group[0]["prompt"] for group in seen[-1]] == [prompt for prompt, _ in prompts]
            if step + 1 < checkpoint + steps or checkpoint:
                await broadcast(engine, weights, sent)
        if not checkpoint:
            await engine.run.__aexit__(None, None, None)
        return seen, engine.run.config

    first, _ = asyncio.run(train(0, 2))
    (tmp_path / "o/global_step1").mkdir(parents=True)
    (tmp_path / "o/latest").write_text("global_step1")
    again, config = asyncio.run(train(1, 2))
    assert again[0] == first[1], "the same batch comes again"
    assert assert_closed(config.run_dir)["state"] == "finished"
