"""What every back end of the learner keeps to, whichever it is, on any number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import torch
from learner_setup import job, make_config, make_policy, settings, uneven_batch
from reference import ReferenceLearner
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from april.config import Config, ConfigError
from april.config.checks import check
from april.learner import checkpoint
from april.learner.trainer import Trainer

ROOT = Path(__file__).parents[3]
PYTHONS = {"fsdp": sys.executable, "megatron": str(ROOT / ".venv-megatron/bin/python")}
CASES = [("fsdp", 1, 1), ("fsdp", 2, 1), ("megatron", 1, 1), ("megatron", 2, 2), ("megatron", 4, 2)]
"""back end, ranks, of which so many share a layer"""
SHORT = ("fsdp", 2, 1)
MODELS = {
    "tied": {},
    "untied": {"tied": False},
    "qwen2": {"kind": Qwen2Config, "tied": False},
    "llama": {"kind": LlamaConfig},
}
ONE_STEP = {name: (name, {}) for name in MODELS} | {"opob": ("tied", {"advantage": "opob"})}
"""model and keys of [algorithm]; with `opob` the gradient of each response is asked for first"""
UNCLIPPED = {"grad_clip": 1e9, "microbatch_tokens": 64}
LEARNS = {"microbatch_tokens": 64, "grad_clip": 0.5, "weight_decay": 0.1}
STEPS, SAVED_AFTER = 4, 2

pytestmark = [pytest.mark.xdist_group("backends"), pytest.mark.timeout(600)]


def case_of(case):
    marks = [] if case == SHORT else [pytest.mark.full]
    if case[0] == "megatron":
        marks.append(pytest.mark.megatron)
    return pytest.param(case, marks=marks, id="-".join(map(str, case)))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders by name; their vocabulary of 23 does not divide among ranks."""
    folder = tmp_path_factory.mktemp("models")
    made = {"kind": Qwen3Config, "intermediate_size": 34}
    return {name: make_policy(folder / name, **made | options) for name, options in MODELS.items()}


@pytest.fixture(scope="module", params=[case_of(case) for case in CASES])
def outcome(request, models, tmp_path_factory):
    """{job: (result, config, batches, model)}"""
    backend, ranks, shares = request.param
    folder = tmp_path_factory.mktemp("suite")
    where = {"backend": backend, "ranks": ranks, "tensor_parallel": shares}

    def config(name, model, algorithm=(), **learner):
        return make_config(models[model], folder / name, algorithm=algorithm, **where, **learner)

    batches = [uneven_batch(step, models["tied"]) for step in range(STEPS)]
    jobs = {f"loaded {name}": (config(f"loaded-{name}", name), [], models[name]) for name in MODELS}
    for name, (model, keys) in ONE_STEP.items():
        jobs[f"step {name}"] = (config(f"step-{name}", model, keys, **UNCLIPPED), batches[:1], models[model])
    whole = config("whole", "tied", algorithm={"kl_coef": 0.2}, **LEARNS)
    jobs["whole"] = (whole, batches, models["tied"])
    jobs["resumed"] = (whole, batches, models["tied"])
    ordered = [
        job(c, given, save_after=[SAVED_AFTER] if name == "whole" else []) for name, (c, given, _) in jobs.items()
    ]
    (folder / "jobs.json").write_bytes(orjson.dumps(ordered))
    launch = [PYTHONS[backend], "-m", "april.learner.launch", f"--nproc-per-node={ranks}"]
    script = str(Path(__file__).with_name("run_suite.py"))
    with (folder / "output").open("wb") as output:
        done = subprocess.run(
            [*launch, script, str(folder)], stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=500
        )
    assert done.returncode == 0, (folder / "output").read_text()[-4000:]
    results = torch.load(folder / "results.pt")
    return {name: (result, *given) for (name, given), result in zip(jobs.items(), results, strict=True)}


@pytest.fixture(scope="module")
def expected():
    """The reference's step, computed once for each case."""
    known = {}

    def step(case, model, config, batch):
        if case not in known:
            reference = ReferenceLearner(model, settings(config))
            with torch.no_grad():
                logprobs = [reference.sample_logprobs(sample) for sample in batch.samples]
            known[case] = logprobs, reference.gradients(batch.groups)
        return known[case]

    return step


@pytest.mark.parametrize("model", MODELS)
def test_what_is_published_is_the_folder_by_name_and_value(outcome, model):
    result, _, _, folder = outcome[f"loaded {model}"]
    files = load_file(folder / "model.safetensors")
    assert result["weights"].keys() == files.keys()
    assert all(torch.equal(value, files[name]) for name, value in result["weights"].items())


@pytest.mark.parametrize("case", ONE_STEP)
def test_logprobs_loss_and_gradients_are_the_reference_s(outcome, expected, case):
    result, config, (batch,), folder = outcome[f"step {case}"]
    logprobs, step = expected(case, folder, config, batch)
    (found,) = result["steps"]
    assert found["logprobs"]
    for place, seen in found["logprobs"].items():
        torch.testing.assert_close(seen, logprobs[place], rtol=1e-5, atol=1e-5)
    metrics = found["metrics"]
    assert metrics["loss"] == pytest.approx(step.loss, rel=0, abs=1e-5 * max(step.summed, 0.1))
    assert metrics["grad_norm"] == pytest.approx(step.grad_norm, rel=1e-5)
    assert found["gradients"].keys() == step.gradients.keys()
    largest = max(value.abs().max().item() for value in step.gradients.values())
    for name, value in step.gradients.items():
        assert (found["gradients"][name] - value).abs().max().item() <= 1e-5 * largest, name
    assert {name: metrics[name] for name in step.means} == pytest.approx(step.means, rel=1e-4, abs=1e-6)


def test_steps_are_the_reference_s_with_clipping_decay_and_divergence(outcome):
    result, config, batches, folder = outcome["whole"]
    reference = ReferenceLearner(folder, settings(config))
    norms = [reference.step(batch.groups, batch.step).grad_norm for batch in batches]
    assert [step["metrics"]["grad_norm"] for step in result["steps"]] == pytest.approx(norms, rel=1e-3)
    assert max(norms) > config.learner.grad_clip
    for name, parameter in reference.lm.named_parameters():
        off = (result["weights"][name] - parameter.detach()).abs()
        assert off.mean() < 1e-3 * config.learner.lr and off.max() < 0.1 * config.learner.lr, name


def test_a_resumed_run_is_bitwise_the_same(outcome):
    whole, resumed = outcome["whole"][0], outcome["resumed"][0]
    assert (whole["restored"], resumed["restored"]) == (0, SAVED_AFTER)
    for kind in ("weights", "state"):
        assert whole[kind].keys() == resumed[kind].keys()
        assert all(torch.equal(value, resumed[kind][name]) for name, value in whole[kind].items())
    assert whole["canary"] == resumed["canary"]
    metrics = [[untimed(step["metrics"]) for step in result["steps"]] for result in (whole, resumed)]
    assert metrics[0][SAVED_AFTER:] == metrics[1]


def untimed(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith(("_s", "tflop_per_s"))}


def test_another_back_end_goes_on_from_its_checkpoint(outcome, one_rank):
    """With FSDP2 on one rank: weights and moments have one form."""
    _, config, batches, _ = outcome["resumed"]
    section = config.learner.model_copy(update={"backend": "fsdp", "ranks": 1, "tensor_parallel": 1})
    trainer = Trainer(config.model_copy(update={"learner": section}), torch.device("cpu"))
    assert (trainer.restore(), trainer.optimizer_steps) == (SAVED_AFTER, SAVED_AFTER)
    expected = outcome["whole"][0]["steps"]
    for batch, before in zip(batches[SAVED_AFTER:], expected[SAVED_AFTER:], strict=True):
        metrics = trainer.step(batch)
        assert metrics["loss"] == pytest.approx(before["metrics"]["loss"], rel=1e-3, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(before["metrics"]["grad_norm"], rel=1e-3)
    state = {name: tensor.full_tensor() for name, tensor in checkpoint.sharded_state(trainer.parts).items()}
    assert state.keys() == outcome["whole"][0]["state"].keys()
    for name, value in outcome["whole"][0]["state"].items():
        largest = value.abs().max().item()
        assert (state[name] - value).abs().max().item() <= 1e-3 * largest + 1e-7, name


REFUSED = {
    "splits layers": ({"learner": {"tensor_parallel": 2}}, "'learner.tensor_parallel' = 2 splits layers, which"),
    "ranks": (
        {"learner": {"backend": "megatron", "ranks": 3, "tensor_parallel": 2}},
        "does not divide learner.ranks = 3",
    ),
    "lora": ({"learner": {"backend": "megatron"}, "lora": {"rank": 4}}, "does not do lora.rank = 4"),
    "critic": ({"learner": {"backend": "megatron"}, "algorithm": {"advantage": "gae"}}, "advantage = 'gae'"),
    "bf16": ({"learner": {"backend": "megatron", "compute": "bf16"}}, "does not do learner.compute = 'bf16'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_back_end_does_not_do_is_refused_before_a_run(what, tmp_path):
    changes, why = REFUSED[what]
    tree = {"model": {"path": tmp_path}, "data": {"path": "none.jsonl"}, "run": {"dir": tmp_path, "name": "r"}}
    with pytest.raises(ConfigError, match=re.escape(why)):
        check(Config.model_validate(tree | changes), inputs=())
