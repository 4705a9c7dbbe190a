"""Program that the learner's tests run under torchrun: trains each job of a folder's jobs.json, and writes
results.pt."""

import faulthandler
import shutil
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import orjson
import torch
import torch.distributed as dist
from msgspec.structs import asdict
from torch.distributed.tensor import DTensor

from april.config import Config
from april.learner import exports, loop, process_group, weight_parts
from april.learner.batch import decode, share_batch
from april.learner.model import BUCKET_BYTES
from april.learner.trainer import Trainer
from april.learner.weight_parts import gather_part
from april.util import files
from april.util.lifetime import exit_at_once
from april.wire.message import Version
from tests.support.learner.frozen_weights import FrozenTrainer, full_gradients
from tests.support.learner.gathered_parts import from_parts
from tests.support.learner.small_learner import (
    Diary,
    at_a_worker,
    flip_a_bit,
    full_moments,
    on_disk,
    set_adapter,
    set_head,
    whole_critic,
)


def run(job: dict, device: torch.device) -> dict:
    config = Config.model_validate(job["config"])
    if dist.get_rank() == 0:
        spoil(config.run.dir, job)
    dist.barrier()
    trainer = Trainer(on_disk(config, job["disks"][dist.get_rank()]) if "disks" in job else config, device)
    restored = trainer.restore() if job.get("restore") else None
    if job.get("random_adapter"):
        set_adapter(trainer)
    if job.get("set_head"):
        set_head(trainer)
    metrics, gradients, critic_metrics = [], [], []
    for data in job["batches"]:
        batch = decode(bytes.fromhex(data)) if dist.get_rank() == 0 else None
        metrics.append(trainer.step(share_batch(batch)))
        gradients.append(full_gradients(trainer.policy.lm))
        critic_metrics.append(full_gradients(trainer.critic.part.model) if trainer.critic else {})
        if trainer.step_count in job.get("save_after", []):
            trainer.save()
    return {
        "restored": restored,
        "metrics": metrics,
        "gradients": gradients,
        "canary": asdict(trainer.canary()),
        "whole_policy": unsharded(trainer.policy),
        "weights": trainer.weights(),
        "from_parts": from_parts(trainer),
        "at_a_worker": at_a_worker(trainer.weights_to_publish()),
        "moments": full_moments(trainer),
        "critic": {
            "weights": whole_critic(trainer),
            "gradients": critic_metrics,
            "moments": full_moments(trainer.critic.part) if trainer.critic else [],
        },
        "optimizer_steps": trainer.optimizer_steps,
        "whole": unsharded(trainer.reference) if trainer.reference else [],
    }


def spoil(folder: Path, job: dict) -> None:
    for name in job.get("without", []):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in job.get("flip_in", []):
        flip_a_bit(folder / name)


def unsharded(policy) -> list[str]:
    """Names of parameters that are not sharded, so that each rank holds them whole."""
    return [name for name, parameter in policy.named_parameters() if not isinstance(parameter, DTensor)]


def live(job: dict, device: torch.device) -> dict:
    config = Config.model_validate(job["config"])
    diary = Diary(config.model.path, **job["live"]) if dist.get_rank() == 0 else None
    trainer = Trainer(config, device)
    if diary:
        diary.durable = late(diary.durable, job.get("late_s", 0.0))
        exports.write_pieces = late(exports.write_pieces, job.get("late_s", 0.0))
    loop.run(config, trainer, diary, diary)
    weights = trainer.weights()
    if diary is None:
        return {"weights": weights}
    events = [(what, *(tuple(of) if isinstance(of, tuple) else of for of in rest)) for what, *rest in diary.events]
    return {"weights": weights, "events": events, "losses": [metrics["loss"] for metrics in diary.metrics]}


def late(work: Callable, seconds: float) -> Callable:
    def wait_and_work(*arguments, **options):
        time.sleep(seconds)
        return work(*arguments, **options)

    return wait_and_work


def compare(job: dict, device: torch.device) -> dict:
    """Metrics and gradients of each configuration, on the same batch and weights."""
    batch = share_batch(decode(bytes.fromhex(job["batches"][0])) if dist.get_rank() == 0 else None)
    configs = [Config.model_validate(config) for config in job["compare"]]
    trainer = FrozenTrainer(configs[0].model.path, configs[0].run_dir)
    return {"weights": {}, "outcomes": [trainer.gradients(batch, config) for config in configs]}


def parts(job: dict, device: torch.device) -> dict:
    """The weights as rank 0 gathers them, and from the parts that the ranks gather, which each rank's names list."""
    trainer = Trainer(Config.model_validate(job["config"]), device)
    if job.get("random_adapter"):
        set_adapter(trainer)
    weight_parts.BUCKET_BYTES = job.get("bucket_bytes", BUCKET_BYTES)
    own = gather_part(Version(0, 0), trainer.backend.divisible_weights()).heads
    names = process_group.all_gather_values([head.name for head in own], list[str])
    return {"weights": trainer.weights(), "from_parts": from_parts(trainer), "names": names}


def export(job: dict, device: torch.device) -> dict:
    """Why each rank cannot write the model, "" if it can, where every write of one rank fails so many times."""
    config, rank, failures = Config.model_validate(job["config"]), dist.get_rank(), count()
    trainer = Trainer(on_disk(config, job["disks"][rank]) if "disks" in job else config, device)
    write, (failing_rank, fails) = files.write_pieces, job["export"]

    def write_or_fail(*arguments):
        if rank == failing_rank and next(failures) < fails:
            raise OSError("No space left on device")
        write(*arguments)

    exports.write_pieces, reason = write_or_fail, ""
    try:
        trainer.write_model(trainer.config.exported_policy)
    except OSError as error:
        reason = str(error)
    return {"weights": {}, "reasons": process_group.all_gather_values(reason, str)}


KINDS = {"live": live, "compare": compare, "parts": parts, "export": export}


def main(folder: Path) -> None:
    faulthandler.enable()
    jobs = orjson.loads((folder / "jobs.json").read_bytes())
    device = process_group.join(Config.model_validate(jobs[0]["config"]).learner)
    results = [next((KINDS[kind] for kind in KINDS if kind in job), run)(job, device) for job in jobs]
    if dist.get_rank() == 0:
        torch.save(results, folder / "results.pt")
    assert dist.get_rank() == 0 or not any(result["weights"] for result in results)
    process_group.leave()
    exit_at_once(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
