"""The contract of every back end of the learner, on any number of ranks."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from april.config import Config, ConfigError
from april.config.checks import check
from april.learner import checkpoint
from april.learner.trainer import Trainer
from tests.support.learner.comparison import equal
from tests.support.learner.frozen_weights import short
from tests.support.learner.reference import ReferenceLearner
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import job, make_config, make_policy, settings, uneven_batch
from tests.support.marks import full

ROOT = Path(__file__).parents[3]
PYTHONS = {"fsdp": sys.executable, "megatron": str(ROOT / ".venv-megatron/bin/python")}
CASES = [
    ("fsdp", 1, 1, 1, 1), ("fsdp", 2, 1, 1, 1), ("megatron", 1, 1, 1, 1), ("megatron", 4, 1, 2, 4),
    ("megatron", 4, 2, 1, 2),
]  # fmt: skip
"""(back end, ranks, pipeline stages, tensor-parallel ranks, expert-parallel ranks)."""
SHORT = ("fsdp", 2, 1, 1, 1)
EXPERTS = {"kind": Qwen3MoeConfig, "moe_intermediate_size": 12}
MIXTURES = {
    "experts": EXPERTS | {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "some experts": EXPERTS | {"num_experts": 5, "num_experts_per_tok": 3, "tied": False, "mlp_only_layers": [0]},
}
"""the weights of a token's experts add up to 1, or to what they have of all; the latter's first layer has no experts,
and its second five, which are not divided"""
MODELS = {
    "tied": {},
    "untied": {"tied": False},
    "qwen2": {"kind": Qwen2Config, "tied": False},
    "llama": {"kind": LlamaConfig, "layers": 3},
} | MIXTURES
FURTHER = ["untied", "qwen2", "llama"]
"""Models of which the short suite trains no step."""
ONE_STEP = {name: (name, {}) for name in MODELS} | {"opob": ("tied", {"advantage": "opob"})}
"""model and keys of [algorithm]; with `opob` the gradient of each response is asked for first"""
UNCLIPPED = {"grad_clip": 1e9, "microbatch_tokens": 64}
LEARNS = {"microbatch_tokens": 64, "grad_clip": 0.5, "weight_decay": 0.1}
KL = {"kl_coef": 0.2}
UNBOUND = {"clip_low": 1.0, "clip_high": 100.0}
"""Clip bounds that no ratio reaches, so that rounding cannot decide about clipping."""
STEPS, SAVED_AFTER = 3, 2
RUNS = ["experts", "tied"]
"""Models trained for several steps, and resumed from a checkpoint."""
EACH_RUN = pytest.mark.parametrize("model", ["experts", full("tied")])

pytestmark = [pytest.mark.xdist_group("backends"), pytest.mark.timeout(600)]


def case_of(case):
    name = "-".join(map(str, case))
    marks = [] if case == SHORT else [pytest.mark.full, pytest.mark.turn(name)]
    if case[0] == "megatron":
        marks.append(pytest.mark.megatron)
    return pytest.param(case, marks=marks, id=name)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders by name; their vocabulary of 23 does not divide among ranks."""
    folder = tmp_path_factory.mktemp("models")
    made = {"kind": Qwen3Config, "intermediate_size": 34}
    return {name: make_policy(folder / name, **made | options) for name, options in MODELS.items()}


@pytest.fixture(scope="module")
def batches(models):
    return [uneven_batch(step, models["tied"]) for step in range(STEPS)]


@pytest.fixture(scope="module")
def begun(models, batches, tmp_path_factory):
    """Run folders by model, each with a checkpoint of FSDP2 on one rank."""
    folder = tmp_path_factory.mktemp("begun")
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    for model in RUNS:
        trainer = Trainer(make_config(models[model], folder / model, algorithm=KL, **LEARNS), torch.device("cpu"))
        for batch in batches[:SAVED_AFTER]:
            trainer.step(batch)
        trainer.save()
    dist.destroy_process_group()
    return {model: folder / model for model in RUNS}


class Ranks:
    """Ranks of a back end, which train jobs in their folder."""

    def __init__(self, case, models, folder):
        self.backend, self.ranks, stages, shares, self.own_experts = case
        self.models, self.folder = models, folder
        self.where = {"backend": self.backend, "ranks": self.ranks} | {
            "pipeline_parallel": stages, "tensor_parallel": shares,
        }  # fmt: skip

    def config(self, name, model, algorithm=(), **learner):
        learner |= self.where | ({"expert_parallel": self.own_experts} if model == "experts" else {})
        return make_config(self.models[model], self.folder / name, algorithm=algorithm, **learner)

    def one_step(self, batch, cases):
        jobs = {}
        for name, (model, keys) in cases.items():
            given = short(batch) if name == "opob" else batch  # its weights are products over a response
            jobs[f"step {name}"] = (self.config(f"step-{name}", model, keys, **UNCLIPPED), [given], self.models[model])
        return jobs

    def train(self, jobs):
        """{job: (result, config, batches, model)}"""
        ordered = [
            job(
                c, given, loaded=name.startswith("step"),
                save_after=[SAVED_AFTER] if name.startswith(("whole", "rounded")) else [],
            )
            for name, (c, given, _) in jobs.items()
        ]  # fmt: skip
        program = ("tests.learner.backends.run_suite",)
        results = run_ranks(self.ranks, ordered, self.folder, program, PYTHONS[self.backend], limit_s=500)
        return {name: (result, *given) for (name, given), result in zip(jobs.items(), results, strict=True)}


@pytest.fixture(scope="module", params=[case_of(case) for case in CASES])
def ranks(request, models, tmp_path_factory):
    return Ranks(request.param, models, tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def jobs(ranks, models, batches, begun):
    """jobs(cases, run): those of one step of each case, and of several of the model `run`."""

    def of(cases, run):
        found = ranks.one_step(batches[0], {name: ONE_STEP[name] for name in cases})
        whole, taken = (ranks.config(f"{name}-{run}", run, algorithm=KL, **LEARNS) for name in ("whole", "taken"))
        found[f"whole {run}"] = found[f"resumed {run}"] = (whole, batches, models[run])
        found[f"taken {run}"] = (taken, batches, models[run])
        shutil.copytree(begun[run], taken.run_dir)
        rounded = ranks.config(f"rounded-{run}", run, algorithm=KL | UNBOUND, compute="bf16", **LEARNS)
        found[f"rounded {run}"] = found[f"rounded again {run}"] = (rounded, batches, models[run])
        return found

    return of


@pytest.fixture(scope="module")
def few(ranks, jobs):
    return ranks.train(jobs([name for name in ONE_STEP if name not in FURTHER], "experts"))


@pytest.fixture(scope="module")
def further(ranks, jobs):
    return ranks.train(jobs(FURTHER, "tied"))


@pytest.fixture
def outcome(request, few):
    """outcome(job): (result, config, batches, model)"""
    return lambda name: few[name] if name in few else request.getfixturevalue("further")[name]


@pytest.fixture(scope="module")
def expected():
    """The reference's step, computed once per case."""
    known = {}

    def step(case, model, config, batch):
        if case not in known:
            reference = ReferenceLearner(model, settings(config))
            with torch.no_grad():
                logprobs = [reference.sample_logprobs(sample) for sample in batch.samples]
            known[case] = logprobs, reference.gradients(batch.groups)
        return known[case]

    return step


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_published_weights_equal_the_folder_by_name_and_value(outcome, model):
    result, _, _, folder = outcome(f"step {model}")
    files = load_file(folder / "model.safetensors")
    published, from_parts = result["loaded"]
    assert published.keys() == files.keys()
    assert equal(published, files)
    assert equal(from_parts, files), "the ranks gather the same in parts"


@pytest.mark.parametrize("case", [full(name) if name in FURTHER else name for name in ONE_STEP])
def test_logprobs_loss_and_gradients_are_the_reference_s(outcome, expected, case):
    result, config, (batch,), folder = outcome(f"step {case}")
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


@EACH_RUN
def test_steps_are_the_reference_s_with_clipping_decay_and_divergence(outcome, model):
    result, config, batches, folder = outcome(f"whole {model}")
    reference = ReferenceLearner(folder, settings(config))
    norms = [reference.step(batch.groups, batch.step).grad_norm for batch in batches]
    assert [step["metrics"]["grad_norm"] for step in result["steps"]] == pytest.approx(norms, rel=1e-3)
    assert max(norms) > config.learner.grad_clip
    for name, parameter in reference.lm.named_parameters():
        off = (result["state"][f"model.{name}"] - parameter.detach()).abs()
        assert off.mean() < 1e-3 * config.learner.lr and off.max() < 0.1 * config.learner.lr, name


@EACH_RUN
@pytest.mark.parametrize("names", [("whole", "resumed"), ("rounded", "rounded again")], ids=["fp32", "bf16"])
def test_a_resumed_run_is_bitwise_the_same(outcome, model, names):
    whole, resumed = (outcome(f"{name} {model}")[0] for name in names)
    assert (whole["restored"], resumed["restored"]) == (0, SAVED_AFTER)
    for kind in ("weights", "state"):
        assert whole[kind].keys() == resumed[kind].keys()
        assert equal(whole[kind], resumed[kind])
    assert whole["canary"] == resumed["canary"]
    metrics = [[untimed(step["metrics"]) for step in result["steps"]] for result in (whole, resumed)]
    assert metrics[0][SAVED_AFTER:] == metrics[1]


def untimed(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith(("_s", "tflop_per_s"))}


@EACH_RUN
def test_in_bfloat16_a_step_is_the_reference_s_but_for_rounding(outcome, expected, model):
    """Master weights are fp32, and change by less than bfloat16 can represent."""
    result, config, batches, folder = outcome(f"rounded {model}")
    logprobs, step = expected(f"rounded {model}", folder, config, batches[0])
    found = result["steps"][0]
    off = torch.cat([(seen - logprobs[place]).abs() for place, seen in found["logprobs"].items()])
    assert 1e-4 < off.mean() < 0.03
    assert found["metrics"]["loss"] == pytest.approx(step.loss, rel=0.02)
    assert found["metrics"]["grad_norm"] == pytest.approx(step.grad_norm, rel=0.02)
    ours, theirs = (
        torch.cat([gradients[name].flatten() for name in step.gradients])
        for gradients in (found["gradients"], step.gradients)
    )
    assert torch.cosine_similarity(ours, theirs, 0) > 0.998
    kept = [value for name, value in result["state"].items() if name.startswith("model.")]
    assert not all(torch.equal(value, value.bfloat16().float()) for value in kept)


@EACH_RUN
def test_another_back_end_resumes_from_its_checkpoint(outcome, model, one_rank):
    """FSDP2 on one rank resumes from it: weights and moments have one format."""
    _, config, batches, _ = outcome(f"resumed {model}")
    alone = {"backend": "fsdp", "ranks": 1, "pipeline_parallel": 1, "tensor_parallel": 1, "expert_parallel": 1}
    section = config.learner.model_copy(update=alone)
    trainer = Trainer(config.model_copy(update={"learner": section}), torch.device("cpu"))
    assert (trainer.restore(), trainer.optimizer_steps) == (SAVED_AFTER, SAVED_AFTER)
    whole = outcome(f"whole {model}")[0]
    expected = whole["steps"]
    for batch, before in zip(batches[SAVED_AFTER:], expected[SAVED_AFTER:], strict=True):
        metrics = trainer.step(batch)
        assert metrics["loss"] == pytest.approx(before["metrics"]["loss"], rel=1e-3, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(before["metrics"]["grad_norm"], rel=1e-3)
    state = {name: tensor.full_tensor() for name, tensor in checkpoint.sharded_state(trainer.parts).items()}
    assert state.keys() == whole["state"].keys()
    for name, value in whole["state"].items():
        largest = value.abs().max().item()
        assert (state[name] - value).abs().max().item() <= 1e-3 * largest + 1e-7, name


@EACH_RUN
def test_it_resumes_from_the_checkpoint_of_another_back_end(outcome, model):
    """It resumes from a checkpoint of FSDP2 on one rank."""
    whole, taken = outcome(f"whole {model}")[0], outcome(f"taken {model}")[0]
    assert taken["restored"] == SAVED_AFTER
    for step, before in zip(taken["steps"], whole["steps"][SAVED_AFTER:], strict=True):
        assert step["metrics"]["loss"] == pytest.approx(before["metrics"]["loss"], rel=1e-3, abs=1e-5)
    for name, value in whole["state"].items():
        largest = value.abs().max().item()
        assert (taken["state"][name] - value).abs().max().item() <= 1e-3 * largest + 1e-7, name


def megatron(**learner):
    return {"learner": {"backend": "megatron"} | learner}


REFUSED = {
    "splits layers": ({"learner": {"tensor_parallel": 2}}, "key 'learner.tensor_parallel' = 2 "),
    "has stages": ({"learner": {"pipeline_parallel": 2}}, "key 'learner.pipeline_parallel' = 2 "),
    "divides experts": ({"learner": {"expert_parallel": 2}}, "key 'learner.expert_parallel' = 2 "),
    "shares rows": (megatron(context_parallel=2), "key 'learner.context_parallel' = 2 "),
    "ranks of a row": ({"learner": {"ranks": 3, "context_parallel": 2}}, "key 'learner.context_parallel' = 2 "),
    "ranks": (megatron(ranks=3, tensor_parallel=2), "key 'learner.tensor_parallel' = 2 "),
    "ranks of stages": (megatron(ranks=3, pipeline_parallel=2), "key 'learner.pipeline_parallel' = 2 "),
    "ranks of a stage": (megatron(ranks=6, pipeline_parallel=2, tensor_parallel=2), "'learner.tensor_parallel' = 2 "),
    "ranks of experts": (megatron(ranks=3, expert_parallel=2), "key 'learner.expert_parallel' = 2 "),
    "lora": (megatron() | {"lora": {"rank": 4}}, "lora.rank = 4"),
    "critic": (megatron() | {"algorithm": {"advantage": "gae"}}, "algorithm.advantage = 'gae'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_configurations_are_refused_before_a_run(what, tmp_path):
    changes, why = REFUSED[what]
    tree = {"model": {"path": tmp_path}, "data": {"path": "none.jsonl"}, "run": {"dir": tmp_path, "name": "r"}}
    with pytest.raises(ConfigError, match=re.escape(why)):
        check(Config.model_validate(tree | changes), inputs=())
