"""Muon on a processor: torch's, but in float32."""

import copy

import pytest
import torch

from april.learner.optimizers.muon import LR_ADJUSTMENTS, MuonInFloat32, orthogonalised


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_orthogonalising_brings_every_singular_value_near_one_and_keeps_the_directions(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    matrix = u @ torch.diag(values.clamp(min=0.1 * values.max())) @ v
    result = orthogonalised(matrix, iterations=5)
    inner = u.T @ result @ v.T
    assert torch.all((inner.diagonal() > 0.5) & (inner.diagonal() < 1.5))
    assert torch.allclose(inner, torch.diag(inner.diagonal()), atol=1e-4)


@pytest.mark.parametrize("adjustment", LR_ADJUSTMENTS)
def test_it_steps_where_torchs_muon_steps(adjustment):
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((16, 48), (48, 16))]
    theirs, before = copy.deepcopy(ours), copy.deepcopy(ours)
    keys = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": adjustment}
    optimizers = [MuonInFloat32(ours, **keys), torch.optim.Muon(theirs, **keys)]
    for _ in range(5):
        for our, their in zip(ours, theirs, strict=True):
            our.grad = torch.randn(our.shape)
            their.grad = our.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for our, their, start in zip(ours, theirs, before, strict=True):
        moved = (their - start).abs().max()
        assert (our - their).abs().max() < 0.05 * moved, "bfloat16's rounding is all that may differ"
