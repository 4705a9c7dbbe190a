"""The learner's life: restore, announce, then fetch, train, report, checkpoint and publish until the run is over.

Beside the training of one batch, in threads: the next is fetched, shared out and made ready; the last weights are sent
to the workers; a checkpoint is written.
"""

import logging
import time
from pathlib import Path

import orjson
import torch
import torch.distributed as dist

from april.config import Config
from april.learner.batch import Batch, encode
from april.learner.beside import Handover, Publisher, Sending, Source
from april.learner.device_turns import Turn
from april.learner.process_group import handover_group
from april.learner.samples import SampleKeeper
from april.learner.trainer import Trainer
from april.processes.pulse import MAIN

log = logging.getLogger(__name__)

NONE = -1
"""no step"""


class Diverged(RuntimeError):
    """Batch after batch had no finite loss or gradient; the text says where the batches are."""


def run(
    config: Config, trainer: Trainer, source: Source | None, publisher: Publisher | None, turn: Turn | None = None
) -> None:
    """Train until `source.fetch` gives None. Collective; `source` and `publisher` are rank 0's, None elsewhere.

    Batch k turns weights k into k + 1. After it: `consumed(k)`; the checkpoint is begun if one is due, and
    `durable` said when it is on disk; then Version(branch, k + 1) is published, unless it is below the frontier.
    At the end the last weights get a checkpoint if they have none, and are exported, as are the best by
    `evaluation.best`. A batch without a finite loss and
    gradient is passed: it lies in `nonfinite/` of the run folder, and the weights are published again under the next
    name. `Diverged` is raised after `learner.max_nonfinite` in a row.

    `turn`: the one that it has. Where engines take turns with it, it has none while it waits for a batch.

    While rank 0 waits for a broker that cannot write, or writes the last files, the others wait for it in a group whose
    deadline is days, not in the collectives of what comes next.

    The metrics given to `consumed` add to the trainer's: what the step had to wait for, in `wait_s` for the batch,
    `publish_wait_s` for the last weights to be sent, `canary_s` to score the canary under them, `gather_s` to collect
    them, `checkpoint_s` to copy the state;
    `train_s`; and `publish_s` and the publisher's own figures of the weights that batch k was trained on.
    """
    group, meeting = handover_group(), handover_group()
    saved_step = trainer.restore()
    branch, frontier = share_numbers(source.start(saved_step) if source else (0, 0), group)
    keep_best(trainer, source)
    handover = Handover(source, group, trainer.prepare)
    release = Release(trainer, Sending(publisher, branch, frontier))
    nonfinite_in_a_row = 0
    handover.ask(trainer.step_count)
    release.publish()
    turn = turn or Turn(config, trainer.device, dist.get_rank())
    turn.give(trainer)
    costs: dict[str, float] = {}
    keeper = SampleKeeper(config) if source else None
    while arrived := handover.take():
        (batch, ready), wait_s = arrived
        costs |= turn.take(meeting)
        MAIN.at("training")
        handover.ask(batch.step + 1)
        began = time.perf_counter()
        metrics = trainer.step(batch, ready)
        keep_pace(config, began, metrics["tokens"])
        metrics |= costs | {"wait_s": wait_s, "train_s": time.perf_counter() - began} | release.finish()
        metrics |= trainer.checkpoints.figures
        nonfinite_in_a_row = nonfinite_in_a_row + 1 if metrics["nonfinite"] else 0
        if source:
            report(config, source, batch, metrics)
        if keeper and trainer.seen:
            MAIN.at("keeping samples", takes_long=True)
            keeper.keep(batch, ready.prepared, trainer.seen, bool(metrics["nonfinite"]))
        say_durable(trainer, source)
        MAIN.at("meeting the other ranks")
        dist.barrier(meeting)
        costs = {}
        if is_kept(config, trainer.step_count):
            began = time.perf_counter()
            settle(trainer, source, meeting)
            if keeper:
                keeper.finish()
            MAIN.at("copying a checkpoint", takes_long=True)
            trainer.start_save()
            saved_step = trainer.step_count
            costs["checkpoint_s"] = time.perf_counter() - began
        costs |= release.publish()
        turn.give(trainer)
        if nonfinite_in_a_row == config.learner.max_nonfinite:
            raise Diverged(
                f"{nonfinite_in_a_row} batches in a row had a loss or gradient that is not finite; the last is "
                f"{nonfinite_path(config, batch.step)}; lower learner.lr, or raise learner.max_nonfinite = "
                f"{config.learner.max_nonfinite} to go on for longer"
            )
    release.finish()
    turn.take(meeting)
    if keeper and source:
        keeper.keep_left(trainer.step_count, source.left)
        keeper.finish()
    settle(trainer, source, meeting)
    if saved_step != trainer.step_count:
        trainer.start_save()
        settle(trainer, source, meeting)
    MAIN.at("exporting the policy", takes_long=True)
    trainer.export()
    if config.evaluation.best:
        (best,) = share_numbers((best_of(source),), meeting)
        trainer.export_best(best)
    dist.barrier(meeting)


def is_kept(config: Config, step: int) -> bool:
    """Whether weights `step` have a checkpoint, though more are trained: also those that are evaluated, where the best
    of these is kept."""
    evaluation = config.evaluation
    may_be_best = evaluation.best and evaluation.every and step % evaluation.every == 0
    return bool(may_be_best) or step % config.learner.checkpoint_every == 0


def keep_best(trainer: Trainer, source: Source | None) -> None:
    """Have the checkpoint stay that is the best so far by `evaluation.best`, and those that are still evaluated."""
    if source and trainer.config.evaluation.best:
        best, undecided = source.best()
        trainer.checkpoints.kept_besides = {best, *undecided}


def best_of(source: Source | None) -> int:
    """Step of the best weights, -1 where none are known; rank 0 says it."""
    best, _ = source.best() if source else (NONE, [])
    return best


def keep_pace(config: Config, began: float, tokens: float) -> None:
    """Let a step that began then last as long as `learner.pace_token_s` says."""
    time.sleep(max(0.0, began + tokens * config.learner.pace_token_s - time.perf_counter()))


def report(config: Config, source: Source, batch: Batch, metrics: dict[str, float]) -> None:
    """Tell the source what became of a batch, and keep one that was not finite."""
    seconds, loss = metrics["train_s"], metrics["loss"]
    step = batch.step + 1
    log.info("step %d trained in %.2f s, loss %.4f", step, seconds, loss, extra={"step": step})
    if not metrics["nonfinite"]:
        return source.consumed(batch.step, metrics)
    path = nonfinite_path(config, batch.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(batch))
    path.with_suffix(".json").write_bytes(orjson.dumps(metrics, option=orjson.OPT_INDENT_2))
    log.error(
        "the loss or gradient of batch %d is not finite; it lies in %s", batch.step, path, extra={"step": batch.step}
    )
    source.consumed(batch.step, metrics, "nonfinite")


def nonfinite_path(config: Config, step: int) -> Path:
    """MessagePack of `april.learner.batch.encode`; its metrics lie beside it."""
    return config.run_dir / "nonfinite" / f"step_{step:06d}.msgpack"


def say_durable(trainer: Trainer, source: Source | None, wait: bool = False) -> None:
    step = trainer.saved(wait)
    if source and step is not None:
        source.durable(step, trainer.oldest_checkpoint)
        keep_best(trainer, source)


def settle(trainer: Trainer, source: Source | None, meeting: dist.ProcessGroup) -> None:
    """Wait until the checkpoint that is being written is on disk, and the source knows. Collective."""
    MAIN.at("waiting for a checkpoint", takes_long=True)
    say_durable(trainer, source, wait=True)
    MAIN.at("meeting the other ranks")
    dist.barrier(meeting)


class Release:
    """Publishes the trainer's weights: collects them at once, and sends them beside the training."""

    def __init__(self, trainer: Trainer, sending: Sending):
        self.trainer, self.sending = trainer, sending

    def publish(self) -> dict[str, float]:
        """Begin with the weights as they are, unless they are below the frontier. Collective."""
        if not self.sending.is_due(self.trainer.step_count):
            return {}
        began = time.perf_counter()
        MAIN.at("gathering weights")
        canary = self.trainer.canary() if self.trainer.config.weights.canary else None
        scored = time.perf_counter()
        self.sending.start(self.trainer.step_count, self.trainer.published(), canary)
        return {"canary_s": scored - began, "gather_s": time.perf_counter() - scored}

    def finish(self) -> dict[str, float]:
        """Wait for what is being sent; figures about it."""
        MAIN.at("sending weights", takes_long=True)
        return self.sending.finish()


def share_numbers(numbers: tuple[int, ...], group: dist.ProcessGroup) -> tuple[int, ...]:
    """Rank 0's integers on every rank of `group`; the others pass as many."""
    tensor = torch.tensor(numbers)
    dist.broadcast(tensor, src=0, group=group)
    return tuple(tensor.tolist())
