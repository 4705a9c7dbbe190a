"""The cost model's operations equal those that PyTorch counts; a step reports times and speed."""

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma4TextConfig, MistralConfig

from april.learner import performance
from april.learner.attention import Reach
from april.learner.packing import input_tokens
from april.learner.trainer import Trainer
from tests.support.learner.architectures import ARCHITECTURES, SHAPE
from tests.support.learner.small_learner import make_config, uneven_batch


@ARCHITECTURES
def test_a_forward_pass_costs_what_its_products_do(config):
    """PyTorch counts matrix products only, and attention as a full square; the other weights are vectors."""
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    cost = performance.forward_cost(lm)
    vectors = 2 * sum(weight.numel() for weight in lm.base_model.layers.parameters() if weight.dim() == 1)
    for length in (5, 60):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            lm(torch.zeros(1, length, dtype=torch.int64), use_cache=False)
        full_square = cost.of(length, targets=length) + sum(cost.per_square.values()) * length**2
        assert counter.get_total_flops() == pytest.approx(full_square - vectors * length, rel=1e-3)


@pytest.mark.parametrize(
    ("reach", "sees"),
    [
        (Reach(), lambda q, k: True),
        (Reach(window=100), lambda q, k: q - k < 100),
        (Reach(window=1000), lambda q, k: True),
        (Reach(chunk=70), lambda q, k: q // 70 == k // 70),
    ],
    ids=["everything", "a window", "a window that is longer", "chunks"],
)
def test_layers_cost_the_tokens_that_they_see(reach, sees):
    pairs = sum(sees(q, k) for q in range(600) for k in range(q + 1))
    assert reach.squares(600) == pytest.approx(2 * pairs - 600, rel=1e-2)


def test_each_layer_costs_what_its_kind_sees():
    config = Gemma2Config(**SHAPE, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    by_window = performance.forward_cost(AutoModelForCausalLM.from_config(config))
    assert by_window.per_square == {Reach(window=4): 4 * 2 * 8, Reach(): 4 * 2 * 8}
    mistral = performance.forward_cost(AutoModelForCausalLM.from_config(MistralConfig(**SHAPE, sliding_window=4)))
    assert mistral.per_square == {Reach(window=4): 2 * 4 * 2 * 8}


def test_each_layer_costs_heads_of_its_own_size():
    shape = SHAPE | {"per_layer_config": {1: {"head_dim": 16}}, "layer_types": ["sliding_attention", "full_attention"]}
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(Gemma4TextConfig(**shape, sliding_window=4))
    assert performance.forward_cost(lm).per_square == {Reach(window=4): 4 * 2 * 8, Reach(): 4 * 2 * 16}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("Tesla T4", None),
    ],
)
def test_variants_of_an_accelerator_have_their_own_peak(name, peak):
    assert performance.peak_of(name) == peak


@pytest.mark.parametrize(("kl_coef", "passes"), [(0.0, 3), (0.1, 4)])
def test_a_reference_policy_is_one_more_forward_pass(kl_coef, passes, one_rank, policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path, algorithm={"kl_coef": kl_coef})
    trainer = Trainer(config, torch.device("cpu"))
    ready = trainer.prepare(uneven_batch(0, policy_folder))
    forward = sum(trainer.backend.cost.of(input_tokens(s), s.sampled_tokens) for s in ready.prepared.samples)
    assert ready.operations == pytest.approx(passes * forward)


def test_phases_are_parts_of_the_step_and_its_speed_is_that_of_its_operations(one_rank, policy_folder, tmp_path):
    config = make_config(policy_folder, tmp_path, peak_tflops=2.0)
    trainer, batch = Trainer(config, torch.device("cpu")), uneven_batch(0, policy_folder)
    ready, began = trainer.prepare(batch), time.perf_counter()
    metrics = trainer.step(batch, ready)
    elapsed_s = time.perf_counter() - began
    phases = [metrics[name] for name in ("forward_s", "backward_s", "metrics_s", "optimizer_s")]
    assert all(seconds > 0 for seconds in phases) and sum(phases) <= elapsed_s
    assert metrics["tflop_per_s"] * 1e12 * sum(phases) <= ready.operations <= metrics["tflop_per_s"] * 1e12 * elapsed_s
    assert metrics["mfu"] == pytest.approx(metrics["tflop_per_s"] / 2.0)
