"""Every optimizer resumes bitwise from its checkpoints, keeps what it says, and refuses those of another."""

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from april.config import ConfigError, LearnerSection
from april.learner.optimizers import OPTIMIZERS, STATE_BYTES, lr_share
from april.learner.trainer import Trainer
from tests.support.learner.comparison import equal
from tests.support.learner.run_ranks import run_ranks
from tests.support.learner.small_learner import job, make_config, make_policy, uneven_batch

KEYS = {
    "8 bits": {"optimizer": "adamw_8bit"},
    "Muon": {"optimizer": "muon"},
    "on the host": {"optimizer_on_host": True},
    "8 bits on the host": {"optimizer": "adamw_8bit", "optimizer_on_host": True},
    "weights in bf16": {"master_weights": "bf16"},
    "all in 16 and 8 bits": {"master_weights": "bf16", "optimizer": "adamw_8bit"},
}


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    """A policy with matrices of which each of two ranks has more values than 8-bit optimizers keep in fp32."""
    return make_policy(tmp_path_factory.mktemp("policy"), intermediate_size=1024)


@pytest.mark.full
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_a_resumed_run_continues_bitwise_and_its_ranks_may_change(policy_folder, tmp_path, one_rank, keys):
    config = make_config(policy_folder, tmp_path / "run", **keys)
    batches = [uneven_batch(step, policy_folder) for step in range(3)]
    jobs = [job(config, batches, save_after=[2]), job(config, batches[2:], restore=True)]
    whole, resumed = run_ranks(2, jobs, tmp_path / "ranks")
    assert resumed["restored"] == 2
    assert equal(whole["weights"], resumed["weights"])
    for one, other in zip(whole["moments"], resumed["moments"], strict=True):
        assert equal(one, other)
    alone = Trainer(config, torch.device("cpu"))
    assert alone.restore() == 2
    alone.step(batches[2])
    rounding = 2**-7 if "master_weights" in keys else 1e-5  # of one rank's parts at random in other places
    for name, weights in alone.weights().items():
        assert torch.allclose(weights, whole["weights"][name], atol=3e-4, rtol=rounding), name
    other = make_config(policy_folder, tmp_path / "run", optimizer="muon" if "optimizer" not in keys else "adamw")
    with pytest.raises(ConfigError, match=r"learner\.optimizer"):
        Trainer(other, torch.device("cpu")).restore()


def test_a_step_on_the_host_is_the_same(policy_folder, tmp_path, one_rank):
    here, there = (
        Trainer(make_config(policy_folder, tmp_path / str(on_host), optimizer_on_host=on_host), torch.device("cpu"))
        for on_host in (False, True)
    )
    for step in range(2):
        batch = uneven_batch(step, policy_folder)
        here.step(batch), there.step(batch)
    assert equal(here.weights(), there.weights())


def stepped(name: str, **keys):
    """An optimizer of a matrix and a bias, and a second of AdamW in fp32, after the same five steps; with their
    parameters."""
    torch.manual_seed(0)
    made = []
    for each in (name, "adamw"):
        section = LearnerSection(optimizer=each, betas=(0.9, 0.95), weight_decay=0.01, **keys)
        generator = torch.Generator().manual_seed(1)
        trained = [
            ("model.layers.0.up.weight", nn.Parameter(torch.randn(256, 512, generator=generator))),
            ("model.layers.0.up.bias", nn.Parameter(torch.randn(256, generator=generator))),
        ]
        optimizer = OPTIMIZERS.find(each)(trained, 1e-3, section)
        for _ in range(5):
            for _, parameter in trained:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step(1e-3)
        made.append((optimizer, [parameter.detach() for _, parameter in trained]))
    return made


def test_weights_in_bf16_take_steps_that_are_smaller_than_their_rounding():
    """Each of 200 steps is a fiftieth of the distance to the next number; rounded to the nearest, none would move."""
    section = LearnerSection(master_weights="bf16", betas=(0.0, 0.0))
    parameter = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = OPTIMIZERS.find("adamw")([("model.layers.0.up.weight", parameter)], 1e-3, section)
    for _ in range(200):
        parameter.grad = torch.full_like(parameter, -1.0)
        optimizer.step(2**-7 / 50)
    moved = parameter.detach().float() - 1
    assert moved.mean() == pytest.approx(200 * 2**-7 / 50, rel=0.05)
    assert parameter.dtype == torch.bfloat16 and optimizer.moments(parameter)["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("name", STATE_BYTES)
def test_an_optimizer_keeps_the_bytes_that_it_says(name):
    (optimizer, (matrix, _)), _ = stepped(name)
    kept = sum(tensor.nbytes for tensor in optimizer.tensors() if tensor.numel() > 256)
    assert kept / matrix.numel() == pytest.approx(STATE_BYTES[name], rel=0.01)


def test_moments_in_8_bits_move_weights_as_those_in_fp32(tmp_path):
    (_, in_8_bits), (_, in_fp32) = stepped("adamw_8bit")
    start = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    moved = in_fp32[0] - start
    assert (in_8_bits[0] - in_fp32[0]).norm() < 0.05 * moved.norm()
    assert torch.allclose(in_8_bits[1], in_fp32[1], atol=1e-6)  # small tensors are kept in fp32


def test_muon_makes_orthogonal_updates_of_the_size_of_adamw_s():
    (_, (matrix, bias)), (_, (_, by_adamw)) = stepped("muon")
    start = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))
    update = (start - matrix) / 5e-3
    assert 0.1 < update.square().mean().sqrt() < 0.4, "0.2 is AdamW's usual root mean square"
    assert equal({"bias": bias}, {"bias": by_adamw})


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_the_learning_rate_follows_transformers_schedules(schedule):
    section = LearnerSection(lr_schedule=schedule, warmup_steps=5, lr_decay_share=0.2)
    parameter = nn.Parameter(torch.zeros(1))
    name = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}.get(schedule, schedule)
    options = {"num_decay_steps": 9, "decay_type": "linear"} if schedule == "wsd" else None
    theirs = get_scheduler(name, torch.optim.SGD([parameter], lr=1.0), 5, 50, scheduler_specific_kwargs=options)
    for step in range(50):
        if step >= 5:  # transformers' warm-up begins at 0, April's at the first share
            assert lr_share(section, step, 50) == pytest.approx(theirs.get_last_lr()[0], abs=1e-6), step
        theirs.optimizer.step(), theirs.step()
    floored = LearnerSection(lr_schedule=schedule, lr_floor=0.1, warmup_steps=5)
    assert lr_share(floored, 50, 50) == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert lr_share(floored, 0, 50) == pytest.approx(0.2)
