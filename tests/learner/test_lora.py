"""An adapter is trained as by a plain reference; base weights stay frozen; workers and files get both merged."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from april.config import ConfigError
from april.config.training import LoraSection, check_lora
from april.launch.memory import adapter_parameters
from april.learner.batch import TrainingBatch
from april.learner.lora import adapted_layers, adapters_disabled, names_in_folder
from april.learner.trainer import Trainer
from april.weights.base import AdapterWeights
from april.weights.snapshot import pack
from april.wire.message import Version
from tests.support.learner.architectures import ARCHITECTURES, random_model
from tests.support.learner.comparison import same
from tests.support.learner.reference import ReferenceLearner
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import (
    at_a_worker,
    full_moments,
    job,
    make_config,
    make_policy,
    make_sample,
    near_policy,
    random_adapter,
    set_adapter,
    settings,
    uneven_batch,
)

CPU = torch.device("cpu")
LORA = {"rank": 3, "alpha": 6.0}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LowRank(nn.Module):
    """A weight plus alpha / rank times B A."""

    def __init__(self, weight, rank, alpha):
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, weight.shape[1]))
        self.lora_B = nn.Parameter(torch.empty(weight.shape[0], rank))
        self.scaling = alpha / rank

    def forward(self, weight):
        return weight + self.scaling * self.lora_B @ self.lora_A


class LowRankReference(ReferenceLearner):
    """The one-page reference with linear layers whose weight is the merged one."""

    def __init__(self, folder, config):
        super().__init__(folder, settings(config))
        self.lm.requires_grad_(False)
        layers = [(name, layer) for name, layer in self.lm.named_modules() if name.endswith(TARGETS)]
        for _, layer in layers:
            parametrize.register_parametrization(
                layer, "weight", LowRank(layer.weight, config.lora.rank, config.lora.alpha)
            )
        self.lm.get_input_embeddings().weight.requires_grad_(config.lora.embedding)
        trained = {name_of(name): each for name, each in self.lm.named_parameters() if each.requires_grad}
        with torch.no_grad():
            for name, value in random_adapter(trained).items():
                trained[name].copy_(value)
        self.optimizer = torch.optim.AdamW(
            trained.values(), lr=config.learner.lr, betas=config.learner.betas, weight_decay=config.learner.weight_decay
        )

    def merged(self) -> dict[str, torch.Tensor]:
        trained = (*TARGETS, "embed_tokens")
        layers = {f"{name}.weight": each.weight for name, each in self.lm.named_modules() if name.endswith(trained)}
        return {name: weight.detach() for name, weight in layers.items()}


def name_of(parameter: str) -> str:
    return parameter.replace(".parametrizations.weight.0.", ".")


@pytest.fixture(scope="module", params=[1, 2])
def outcome(request, policy_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"lora{request.param}")
    learner = {"microbatch_tokens": 64, "grad_clip": 1e9, "weight_decay": 0.1}
    config = make_config(policy_folder, folder / "run", algorithm={"kl_coef": 0.1}, lora=LORA, **learner)
    batch = uneven_batch(0, policy_folder)
    others = ({"rank": 1, "alpha": 2.0}, {"embedding": True})
    configs = [config, *(config.model_copy(update={"lora": config.lora.model_copy(update=each)}) for each in others)]
    jobs = [job(each, [batch], random_adapter=True) for each in configs]
    *trained, untouched = run_ranks(request.param, [*jobs, job(configs[-1], [])], folder)
    return batch, dict(zip((3, 1, "embedding"), zip(configs, trained, strict=True), strict=True)), untouched


@pytest.mark.full
@pytest.mark.parametrize("rank", [3, 1, "embedding"])
def test_loss_and_gradients_of_an_adapter_equal_the_reference_and_the_model_has_none(outcome, policy_folder, rank):
    """KL included: the starting policy is the model without its adapter, and with the embedding that it began with.
    With rank 1, a second process has no part of A. A random embedding is so far from what sampled that products of a
    response's ratios lose a digit."""
    batch, trained, _ = outcome
    config, result = trained[rank]
    reference = LowRankReference(policy_folder, config)
    expected = reference.gradients(batch.groups, batch.step)
    metrics = result["metrics"][0]
    assert metrics["loss"] == pytest.approx(expected.loss, rel=0, abs=1e-5 * max(expected.summed, 0.1))
    assert metrics["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
    gradients = {name_of(name): value for name, value in expected.gradients.items()}
    assert len(gradients) == 2 * len(TARGETS) * 2 + config.lora.embedding
    same(result["gradients"][0], gradients)
    rel = 1e-3 if config.lora.embedding else 1e-4
    assert {name: metrics[name] for name in expected.means} == pytest.approx(expected.means, rel=rel, abs=1e-6)
    reference.optimizer.step()
    for name, value in reference.merged().items():
        off = (result["weights"][name] - value).abs()
        assert off.mean() < 1e-2 * config.learner.lr and off.max() < config.learner.lr, name


@pytest.mark.full
def test_a_fresh_adapter_changes_no_bit_of_what_is_published(outcome, policy_folder):
    *_, untouched = outcome
    started = load_file(policy_folder / "model.safetensors")
    assert untouched["weights"].keys() == started.keys()
    assert all(torch.equal(value, started[name]) for name, value in untouched["weights"].items())


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]) for name, value in ours.items()
    )


@pytest.mark.full
@pytest.mark.parametrize("rank", [3, 1, "embedding"])
def test_a_worker_merges_the_adapter_into_exactly_the_learner_s_weights(outcome, rank):
    _, trained, untouched = outcome
    _, result = trained[rank]
    assert equal(result["at_a_worker"], result["weights"])
    assert equal(untouched["at_a_worker"], untouched["weights"])


@pytest.fixture
def trainer(one_rank, policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path / "run", lora=LORA, weight_decay=0.1, lr=1e-2)
    return Trainer(config, CPU)


def whole(trainer) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor().clone() for name, value in trainer.policy.lm.named_parameters()}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def beside(request, one_rank, tmp_path):
    """An adapter with a trained embedding."""
    folder = make_policy(tmp_path / "source", tied=request.param)
    config = make_config(folder, tmp_path / "run", lora=LORA | {"embedding": True}, weight_decay=0.1, lr=1e-2)
    return Trainer(config, CPU)


def test_only_trained_tensors_are_published(trainer):
    published = trainer.weights_to_publish()
    assert {name: value.shape for name, value in published.tensors.items()} == {
        name: value.shape for name, value in trainer.policy.trained
    }
    assert all(value.dtype == torch.float32 for value in published.tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trained_embedding_is_published_and_a_tied_head_follows_it(beside, dtype):
    """Files may contain a tied head. Merged weights are rounded once, at the end."""
    set_adapter(beside)
    file = beside.config.model.path / "model.safetensors"
    if beside.policy.lm.config.tie_word_embeddings:
        started = load_file(file)
        file.unlink()
        save_file(started | {"lm_head.weight": started["model.embed_tokens.weight"].clone()}, file)
    assert equal(at_a_worker(beside.backend.weights_to_publish(dtype)), beside.backend.weights(dtype))


def test_steps_change_only_the_adapter(trainer, policy_folder):
    before, published = whole(trainer), trainer.weights()
    for step in range(2):
        trainer.step(uneven_batch(step, policy_folder))
    after, trained = whole(trainer), {name for name, _ in trainer.policy.trained}
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained
    moved = {name for name, value in trainer.weights().items() if not torch.equal(value, published[name])}
    assert moved == {f"{name}.weight" for name in adapted_layers(trainer.policy.lm)}
    with adapters_disabled(trainer.policy):
        off = trainer.canary()
    assert off.logprobs != trainer.canary().logprobs


def test_published_and_exported_weights_have_the_adapter_merged(trainer, policy_folder):
    set_adapter(trainer)
    trainer.step(uneven_batch(0, policy_folder))
    published = trainer.weights()
    trainer.export()
    exported = load_file(trainer.directory / "policy/model.safetensors")
    sums = [
        pack(Version(0, 1), {name: tensors[name] for name in published}).digest for tensors in (published, exported)
    ]
    assert sums[0] == sums[1] and published.keys() == exported.keys()
    started = load_file(policy_folder / "model.safetensors")
    for name, layer in adapted_layers(trainer.policy.lm).items():
        added = layer.lora_B.full_tensor() @ layer.lora_A.full_tensor() * LORA["alpha"] / LORA["rank"]
        torch.testing.assert_close(exported[f"{name}.weight"], started[f"{name}.weight"] + added.detach())
    merged = AutoModelForCausalLM.from_pretrained(trainer.directory / "policy")
    assert type(merged).__name__ == "Qwen3ForCausalLM"


@pytest.mark.full
def test_peft_loads_the_exported_adapter_and_merges_to_the_same_weights(trainer):
    merges_to_what_is_exported(trainer)


@pytest.mark.full
def test_peft_loads_an_exported_adapter_with_its_embedding(beside):
    merges_to_what_is_exported(beside)


def merges_to_what_is_exported(trainer):
    from peft import PeftModel

    set_adapter(trainer)
    trainer.export()
    base = AutoModelForCausalLM.from_pretrained(trainer.config.model.path)
    loaded = PeftModel.from_pretrained(base, trainer.directory / "adapter").merge_and_unload()
    exported = AutoModelForCausalLM.from_pretrained(trainer.directory / "policy").state_dict()
    assert loaded.state_dict().keys() == exported.keys()
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, exported[name], rtol=1e-6, atol=1e-6)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == base.config.tie_word_embeddings


def test_a_trained_embedding_and_an_untied_head_change_and_resume_bitwise(beside):
    """A checkpoint of an adapter without the embedding is refused."""
    before, batches = beside.weights(), [uneven_batch(step, beside.config.model.path) for step in range(3)]
    untied = not beside.policy.lm.config.tie_word_embeddings
    for batch in batches[:2]:
        beside.step(batch)
    beside.save()
    moved = {name for name, value in beside.weights().items() if not torch.equal(value, before[name])}
    tables = {"model.embed_tokens.weight"} | ({"lm_head.weight"} if untied else set())
    assert moved == {f"{name}.weight" for name in adapted_layers(beside.policy.lm)} | tables
    assert adapter_parameters(beside.config) == sum(each.numel() for _, each in beside.policy.trained)
    again = Trainer(beside.config, CPU)
    assert again.restore() == 2
    assert beside.step(batches[2])["loss"] == again.step(batches[2])["loss"]
    assert all(torch.equal(value, again.weights()[name]) for name, value in beside.weights().items())
    alone = make_config(beside.config.model.path, beside.config.run_dir, lora=LORA)
    with pytest.raises(ConfigError, match=r"key 'lora.embedding' = false "):
        Trainer(alone, CPU).restore()


def test_a_checkpoint_holds_only_trained_tensors_and_resumes_bitwise(trainer, policy_folder):
    for step in range(2):
        trainer.step(uneven_batch(step, policy_folder))
    trainer.save()
    held = FileSystemReader(trainer.directory / "step_000002").read_metadata().state_dict_metadata.keys()
    names = {name for name, _ in trainer.policy.trained}
    assert held == {f"{part}.{name}" for part in ("model", "exp_avg", "exp_avg_sq") for name in names}
    expected = trainer.step(uneven_batch(2, policy_folder))
    again = Trainer(trainer.config, CPU)
    assert again.restore() == 2
    metrics = again.step(uneven_batch(2, policy_folder))
    assert (metrics["loss"], metrics["grad_norm"]) == (expected["loss"], expected["grad_norm"])
    assert all(torch.equal(value, again.weights()[name]) for name, value in trainer.weights().items())
    for one, other in zip(full_moments(trainer), full_moments(again), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"rank": 4}, "key 'lora.rank' = 4 "),
        ({"alpha": 7.0}, "key 'lora.alpha' = 7.0 "),
        ({"targets": ["q_proj"]}, r"key 'lora.targets' = \['q_proj'\] "),
        ({"rank": 0}, "key 'lora.rank' = 0 "),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(trainer, policy_folder, other, sentence):
    trainer.save()
    changed = make_config(policy_folder, trainer.config.run_dir, lora=LORA | other)
    with pytest.raises(ConfigError, match=sentence):
        Trainer(changed, CPU).restore()


def test_an_adapter_does_not_resume_a_checkpoint_of_the_whole_model(one_rank, policy_folder, tmp_path):
    Trainer(make_config(policy_folder, tmp_path / "run"), CPU).save()
    with pytest.raises(ConfigError, match=r"key 'lora.rank' = 3 "):
        Trainer(make_config(policy_folder, tmp_path / "run", lora=LORA), CPU).restore()


def test_an_embedding_without_an_adapter_beside_it_is_refused():
    with pytest.raises(ConfigError, match=r"key 'lora.embedding' = true "):
        check_lora(LoraSection(embedding=True))


def test_a_target_that_the_model_does_not_have_is_refused(one_rank, policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path / "run", lora=LORA | {"targets": ["q_proj", "query"]})
    with pytest.raises(ConfigError, match=r"key 'lora.targets' .*'query'"):
        Trainer(config, CPU)


def test_chosen_targets_alone_are_trained(one_rank, policy_folder, tmp_path):
    trainer = Trainer(make_config(policy_folder, tmp_path / "run", lora=LORA | {"targets": ["up_proj"]}), CPU)
    assert {name.rpartition(".mlp.")[2] for name, _ in trainer.policy.trained} == {"up_proj.lora_A", "up_proj.lora_B"}


@ARCHITECTURES
def test_adapted_layers_of_every_architecture_are_counted_and_named_as_in_its_files(config, one_rank, tmp_path):
    trainer = Trainer(make_config(random_model(config, tmp_path / "source"), tmp_path / "run", lora={"rank": 2}), CPU)
    assert adapter_parameters(trainer.config) == sum(each.numel() for _, each in trainer.policy.trained) > 0
    set_adapter(trainer)
    assert isinstance(trainer.weights_to_publish(), AdapterWeights)
    assert equal(at_a_worker(trainer.weights_to_publish()), trainer.weights())


def test_a_model_whose_layers_have_another_form_in_files_is_published_whole(trainer, monkeypatch):
    """Conversion as if files had queries and keys in one tensor."""
    names = [name for name, _ in trainer.policy.trained]

    def fused(lm, state):
        own = "model.layers.0.self_attn"
        both = torch.cat([state.pop(f"{own}.{part}_proj.weight") for part in "qk"])
        return state | {f"{own}.qk_proj.weight": both}

    assert len(names_in_folder(trainer.policy.lm, names)) == len(names) // 2
    monkeypatch.setattr("april.learner.loading.revert_weight_conversion", fused)
    assert names_in_folder(trainer.policy.lm, names) is None
    trainer.backend.files = None
    assert equal(trainer.weights_to_publish(), trainer.weights())


@pytest.mark.full
@ARCHITECTURES
def test_steps_of_an_adapter_in_bf16_lower_the_loss_and_move_fp32_weights(config, one_rank, tmp_path):
    folder = random_model(config, tmp_path / "source")
    learner = {"lr": 1e-2, "compute": "bf16", "activation_checkpointing": True}
    trainer = Trainer(make_config(folder, tmp_path / "run", lora=LORA, **learner), CPU)
    rng = np.random.default_rng(0)
    samples = [make_sample(rng, 3, length, reward) for length, reward in [(5, 1.0), (30, 0.0), (9, 1.0), (2, 0.0)]]
    batch = near_policy(TrainingBatch(0, [samples]), folder, rng)
    before = trainer.weights()
    losses = [trainer.step(batch)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    moved = {name for name, value in trainer.weights().items() if not torch.equal(value, before[name])}
    assert len(moved) == len(adapted_layers(trainer.policy.lm))
    assert all(parameter.dtype == torch.float32 for _, parameter in trainer.policy.trained)
