"""An adapter over a base in bfloat16 or NF4 trains as over a folder that has the rounded weights, which workers get."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from april.config import ConfigError
from april.config.training import LoraSection, check_base, check_lora
from april.learner.frozen_base import pack, unpack
from april.learner.trainer import Trainer
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import job, make_config, make_policy, uneven_batch

LORA = {"rank": 3, "alpha": 6.0}
STEPS = 3


def rounded(name: str, value: torch.Tensor, base: str) -> torch.Tensor:
    """A tensor of the starting policy as the learner holds it: rows of 64 are whole blocks, others stay in bfloat16."""
    is_packed = base == "nf4" and ".layers." in name and value.ndim == 2 and value.shape[1] % 64 == 0
    return unpack(pack(value), value.shape[1]) if is_packed else value.float()


@pytest.fixture(scope="module")
def wide_policy(tmp_path_factory):
    """In bfloat16, with layers of two kinds: the MLP's last matrix has rows of 64, all others rows of 20 or 32."""
    folder = make_policy(tmp_path_factory.mktemp("wide") / "policy", intermediate_size=64)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_training_over_a_rounded_base_equals_training_of_a_rounded_folder(base, ranks, wide_policy, tmp_path):
    """KL to the starting policy included, which is the rounded one."""
    started = load_file(wide_policy / "model.safetensors")
    weights = {name: rounded(name, value, base) for name, value in started.items()}
    moved = {name for name, value in weights.items() if not torch.equal(value, started[name].float())}
    assert bool(moved) == (base == "nf4") and all(name.endswith("down_proj.weight") for name in moved)
    plain = make_policy(tmp_path / "plain", intermediate_size=64)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})

    batches = [uneven_batch(step, wide_policy) for step in range(STEPS)]
    configs = [
        make_config(
            policy, tmp_path / form, algorithm={"kl_coef": 0.1}, lora=LORA | {"base": form}, microbatch_tokens=64
        )
        for policy, form in ((wide_policy, base), (plain, "fp32"))
    ]
    ours, theirs = run_ranks(ranks, [job(config, batches) for config in configs], tmp_path)
    for one, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        found, expected = ([each[key] for key in ("loss", "grad_norm")] for each in (one, other))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, value in ours["weights"].items():
        torch.testing.assert_close(value, theirs["weights"][name], rtol=1e-5, atol=1e-6)
        assert torch.equal(ours["at_a_worker"][name], value), name


def test_a_matrix_keeps_its_largest_values_and_half_a_byte_a_value():
    values = torch.randn(3, 128)
    packed = pack(values)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 64 + 8)
    largest = values.view(3, 2, 64).abs().argmax(2, keepdim=True)
    for whole in (values, unpack(packed, 128)):
        torch.testing.assert_close(whole.view(3, 2, 64).gather(2, largest), values.view(3, 2, 64).gather(2, largest))
    assert (unpack(packed, 128) - values).abs().mean() < 0.1


@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_an_exported_policy_has_the_base_that_was_trained_and_another_base_is_refused(
    base, one_rank, wide_policy, tmp_path
):
    trainer = Trainer(make_config(wide_policy, tmp_path / "run", lora=LORA | {"base": base}), torch.device("cpu"))
    trainer.step(uneven_batch(0, wide_policy))
    trainer.save()
    trainer.export()
    exported = AutoModelForCausalLM.from_pretrained(trainer.directory / "policy").state_dict()
    assert all(torch.equal(exported[name], value.bfloat16()) for name, value in trainer.weights().items())
    other = make_config(wide_policy, tmp_path / "run", lora=LORA)
    with pytest.raises(ConfigError, match=r"key 'lora.base' = 'fp32' "):
        Trainer(other, torch.device("cpu")).restore()


def test_a_base_without_an_adapter_and_one_that_rounds_what_workers_have_are_refused():
    with pytest.raises(ConfigError, match=r"key 'lora.base' = 'nf4' "):
        check_lora(LoraSection(base="nf4"))
    with pytest.raises(ConfigError, match=r"'lora\.base' = 'bf16' .*float32"):
        check_base(LoraSection(rank=3, base="bf16"), "float32")
