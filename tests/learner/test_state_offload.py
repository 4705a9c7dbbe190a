"""A trainer whose state is offloaded between batches trains like one whose state stays on the device."""

import torch

from april.learner.time_sharing import HostOffload
from april.learner.trainer import Trainer
from tests.support.learner.comparison import equal
from tests.support.learner.small_learner import make_config, uneven_batch


def test_a_trainer_offloaded_between_batches_trains_bitwise_the_same(one_rank, policy_folder, tmp_path):
    staying, leaving = (
        Trainer(make_config(policy_folder, tmp_path / name, algorithm={"kl_coef": 0.1}), torch.device("cpu"))
        for name in ("staying", "leaving")
    )
    parking = HostOffload(leaving.device, tmp_path)
    for step in range(3):
        assert parking.offload(leaving.device_tensors()) > 0
        assert all(part.to_local().untyped_storage().nbytes() == 0 for part in leaving.policy.parameters())
        parking.restore()
        metrics = [trainer.step(uneven_batch(step, policy_folder)) for trainer in (staying, leaving)]
        assert metrics[0]["loss"] == metrics[1]["loss"] and metrics[0]["grad_norm"] == metrics[1]["grad_norm"]
        assert staying.canary() == leaving.canary()
    kept, moved = staying.weights(), leaving.weights()
    assert equal(kept, moved)
