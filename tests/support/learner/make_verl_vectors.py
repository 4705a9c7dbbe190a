"""Writes verl_vectors.json: what verl's `core_algos` and rollout corrections give on random tensors.

Run once, with verl in a folder of its own:

    pip install --no-deps --target VERL verl==0.9.1 tensordict omegaconf hydra-core codetiming \
        antlr4-python3-runtime==4.9.3 pyvers dill cloudpickle
    PYTHONPATH=VERL python tests/support/learner/make_verl_vectors.py
"""

from importlib.metadata import version
from pathlib import Path

import numpy as np
import orjson
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig

OUT = Path(__file__).with_name("verl_vectors.json")
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}
LOSSES = {
    "ppo": ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}),
    "gspo_token": ("gspo", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.03}),
    "cispo": ("cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
}
LENGTHS = [7, 1, 4, 9, 3, 5, 2, 6]
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2]
REWARDS = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 0.25, 0.25]


def main() -> None:
    generator = torch.Generator().manual_seed(11)
    longest = max(LENGTHS)
    mask = (torch.arange(longest) < torch.tensor(LENGTHS)[:, None]).float()
    behaviour = -2 * torch.rand(len(LENGTHS), longest, generator=generator)
    logprobs = behaviour + 0.3 * torch.randn(behaviour.shape, generator=generator)
    reference = behaviour + 0.3 * torch.randn(behaviour.shape, generator=generator)
    advantages = torch.randn(len(LENGTHS), 1, generator=generator)
    result = {
        "verl": version("verl"),
        "lengths": LENGTHS,
        "groups": GROUPS,
        "rewards": REWARDS,
        "columns": {
            "logprobs": flat(logprobs, mask),
            "behaviour": flat(behaviour, mask),
            "reference": flat(reference, mask),
            "advantages": flat(advantages.expand_as(mask), mask),
        },
        "advantages": estimated(mask),
        "losses": losses(logprobs, behaviour, advantages.expand_as(mask), mask),
        "divergences": {
            name: flat(core_algos.kl_penalty(logprobs, reference, name), mask) for name in ("k1", "k2", "k3")
        },
        "corrections": corrections(logprobs, behaviour, mask),
    }
    OUT.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def flat(values: torch.Tensor, mask: torch.Tensor) -> list[float]:
    return values[mask.bool()].tolist()


def estimated(mask: torch.Tensor) -> dict[str, list[float]]:
    """Advantages that verl computes, one per sample, by estimator."""
    last = torch.tensor(LENGTHS) - 1
    index = np.array([str(group) for group in GROUPS])

    def scores() -> torch.Tensor:
        return torch.zeros_like(mask).index_put((torch.arange(len(LENGTHS)), last), torch.tensor(REWARDS))

    return {
        "grpo": core_algos.compute_grpo_outcome_advantage(scores(), mask, index)[0][:, 0].tolist(),
        "dr_grpo": core_algos.compute_grpo_outcome_advantage(scores(), mask, index, norm_adv_by_std_in_grpo=False)[0][
            :, 0
        ].tolist(),
        "rloo": core_algos.compute_rloo_outcome_advantage(scores(), mask, index)[0][:, 0].tolist(),
        "reinforce_pp": core_algos.compute_reinforce_plus_plus_outcome_advantage(scores(), mask, AlgoConfig(gamma=1.0))[
            0
        ][:, 0].tolist(),
        "reinforce_pp_baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            scores(), mask, index
        )[0][:, 0].tolist(),
    }


def losses(logprobs, behaviour, advantages, mask) -> dict[str, dict]:
    """Loss value and gradient with respect to each log-probability that verl computes, by loss and normalisation."""
    result = {}
    for ours, (theirs, clip) in LOSSES.items():
        for normalisation, aggregation in AGGREGATIONS.items():
            config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **clip)
            leaf = logprobs.clone().requires_grad_()
            loss, _ = core_algos.get_policy_loss_fn(theirs)(behaviour, leaf, advantages, mask, aggregation, config)
            loss.backward()
            result[f"{ours} {normalisation}"] = {"loss": loss.item(), "gradient": flat(leaf.grad, mask)}
    return result


def corrections(logprobs, behaviour, mask) -> dict[str, list[float]]:
    def weights(**options):
        batch, kept, _ = compute_rollout_correction_and_rejection_mask(logprobs, behaviour, mask, **options)
        found = torch.ones_like(mask) if batch is None else batch.batch["rollout_is_weights"]
        return flat(found * kept, mask)

    return {
        "truncated": weights(rollout_is="token", rollout_is_threshold=1.2),
        "truncated_sequence": weights(rollout_is="sequence", rollout_is_threshold=1.2),
        "icepop": weights(rollout_is="token", rollout_is_threshold="0.8_1.2"),
        "geometric": weights(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9_1.1"),
    }


if __name__ == "__main__":
    main()
