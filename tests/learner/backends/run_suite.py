"""Run under torchrun by the suite of back ends, in an environment that has one: the jobs of a folder's jobs.json.

A job trains its batches, and says what the suite compares: tensors whole, by Hugging Face name, as rank 0 has them.
"""

import sys
from pathlib import Path

import orjson
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from april.config import Config
from april.learner import checkpoint, process_group
from april.learner.batch import TrainingBatch, decode, share_batch
from april.learner.trainer import Trainer
from april.util.lifetime import exit_at_once
from tests.support.learner.gathered_parts import from_parts


def run(job: dict, device: torch.device) -> dict:
    trainer = Trainer(Config.model_validate(job["config"]), device)
    restored = trainer.restore()
    loaded, steps = (trainer.weights(), from_parts(trainer)) if job["loaded"] else (), []
    for data in job["batches"][trainer.step_count :]:
        batch = share_batch(decode(bytes.fromhex(data)) if dist.get_rank() == 0 else None)
        steps.append(step(trainer, batch))
        if trainer.step_count in job["save_after"]:
            trainer.save()
    if job["loaded"]:
        return {"loaded": loaded, "steps": steps}
    state = together(checkpoint.sharded_state(trainer.parts))
    trainer.canaries.trained_text = None  # else it is of the first batch that this process has trained
    return {
        "restored": restored, "steps": steps, "canary": trainer.canary().logprobs, "weights": trainer.weights(),
        "state": state,
    }  # fmt: skip


def step(trainer: Trainer, batch: TrainingBatch) -> dict:
    """Train a batch; returns its metrics, and of the first one gradients and log-probabilities, too."""
    ready = trainer.prepare(batch)
    metrics = trainer.step(batch, ready)
    assert trainer.token_stats
    if batch.step:
        return {"metrics": metrics}
    seen = dict(zip(ready.prepared.batch_indices, map(torch.from_numpy, trainer.token_stats.per_sample()), strict=True))
    return {"metrics": metrics, "gradients": gradients(trainer), "logprobs": {i: seen[i][0].clone() for i in seen}}


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Clipped gradients by name, unsharded. Collective."""
    mapped_tensors = getattr(trainer.policy, "mapped_tensors", None)
    if mapped_tensors:
        found = {mapped.name: [parameter.grad for parameter in mapped.parameters] for mapped in mapped_tensors}
        return together({mapped.name: mapped.to_hugging_face(found[mapped.name]) for mapped in mapped_tensors})
    return together({name: parameter.grad for name, parameter in trainer.policy.trained})


def together(tensors: dict[str, DTensor]) -> dict[str, torch.Tensor]:
    """The unsharded tensors of all ranks; ranks that hold the same tensor agree. Collective."""
    own = {name: tensor.full_tensor().clone() for name, tensor in tensors.items()}
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    found = {name: value for each in of_ranks for name, value in each.items()}
    for rank, each in enumerate(of_ranks):
        differs = [name for name, value in each.items() if not torch.equal(value, found[name])]
        assert not differs, f"rank {rank} has others than the ranks after it: {differs}"
    return found


def main(folder: Path) -> None:
    jobs = orjson.loads((folder / "jobs.json").read_bytes())
    device = process_group.join(Config.model_validate(jobs[0]["config"]).learner)
    results = [run(job, device) for job in jobs]
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    process_group.leave()
    exit_at_once(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
