"""Experts that files name one by one, in a back end with a module for each."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig

from april.learner.backends.megatron.layout import REPLICAS, SHARES
from april.learner.backends.megatron.names import STACKED, check_experts, whole
from april.learner.backends.megatron.piece import ROWS, StackedExperts
from april.learner.loading import ModelError, WeightFiles
from april.learner.model import empty_policy, load
from tests.support.learner.small_learner import make_policy

EXPERTS = {"num_experts": 11, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


@pytest.fixture
def folder(tmp_path):
    return make_policy(tmp_path / "model", kind=Qwen3MoeConfig, **EXPERTS)


def stack(name, expected):
    """Stacked experts whose parameters have no values yet."""
    _, kinds = STACKED[name]
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=(REPLICAS, SHARES))
    experts = [nn.Parameter(torch.zeros(expected.shape[1:])) for _ in expected]
    full_name = f"model.layers.1.{name}"
    return StackedExperts(full_name, experts, expected.to("meta"), ROWS, mesh, whole, kinds, is_split=False)


@pytest.mark.parametrize("name", STACKED)
def test_experts_are_read_and_returned_stacked_as_in_transformers(name, folder, one_rank):
    expected = load(folder, 1.0).lm.get_parameter(f"model.layers.1.{name}").detach()
    experts = stack(name, expected)
    experts.read(WeightFiles(folder))
    assert all(torch.equal(*pair) for pair in zip(experts.parameters, expected, strict=True))
    assert torch.equal(experts.to_hugging_face(experts.parameters).full_tensor(), expected)
    experts.from_hugging_face(experts.parameters, expected.flip(0))
    assert torch.equal(experts.to_hugging_face(experts.parameters).full_tensor(), expected.flip(0))


def test_a_folder_that_lacks_an_expert_is_refused(folder, one_rank):
    name = "mlp.experts.gate_up_proj"
    expected = load(folder, 1.0).lm.get_parameter(f"model.layers.1.{name}").detach()
    weights, lost = load_file(folder / "model.safetensors"), "model.layers.1.mlp.experts.7.up_proj.weight"
    save_file({key: value for key, value in weights.items() if key != lost}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"its weights lack {lost}"):
        stack(name, expected).read(WeightFiles(folder))


REFUSED = {
    "none": ({}, 2, "learner.expert_parallel = 2 divides experts, and the model has none"),
    "not as many": (EXPERTS, 2, "learner.expert_parallel = 2 does not divide its num_experts = 11"),
    "one of a weight of 1": (EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": True}, 1, "its routers get no"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_mixtures_of_experts_are_refused(what, tmp_path):
    experts, ranks, why = REFUSED[what]
    folder = make_policy(tmp_path / "model", **({"kind": Qwen3MoeConfig, **experts} if experts else {}))
    with pytest.raises(ModelError, match=why):
        check_experts(empty_policy(folder, 1.0).lm, folder, SimpleNamespace(expert_parallel=ranks))
