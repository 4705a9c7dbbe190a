"""A trainer whose state lies elsewhere between its batches trains as one whose state stays."""

import torch
from learner_setup import make_config, uneven_batch

from april.learner.parking import Parking
from april.learner.trainer import Trainer


def test_a_trainer_that_leaves_between_batches_trains_bitwise_the_same(one_rank, policy_folder, tmp_path):
    staying, leaving = (
        Trainer(make_config(policy_folder, tmp_path / name, algorithm={"kl_coef": 0.1}), torch.device("cpu"))
        for name in ("staying", "leaving")
    )
    parking = Parking(leaving.device, tmp_path)
    for step in range(3):
        assert parking.park(leaving.held()) > 0
        assert all(part.to_local().untyped_storage().nbytes() == 0 for part in leaving.policy.parameters())
        parking.unpark()
        metrics = [trainer.step(uneven_batch(step, policy_folder)) for trainer in (staying, leaving)]
        assert metrics[0]["loss"] == metrics[1]["loss"] and metrics[0]["grad_norm"] == metrics[1]["grad_norm"]
        assert staying.canary() == leaving.canary()
    kept, moved = staying.weights(), leaving.weights()
    assert all(torch.equal(value, moved[name]) for name, value in kept.items())
