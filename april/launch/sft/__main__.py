"""One rank of a supervised run: `torchrun --nproc-per-node R -m april.launch.sft CONFIG ...`.

A run that has checkpoints goes on from the newest one.
"""

import argparse
import logging
import sys
from pathlib import Path

from april import config as configuration
from april.learner.rank import run_rank
from april.util.files import keep_private
from april.util.logs import log_to_stderr
from april.util.registry import REGISTRIES, add_import_folders

log = logging.getLogger(__name__)

SFT_PARTS = [key for key in REGISTRIES if key.startswith(("learner.", "data.", "operations."))]
"""Configuration keys that name parts which a supervised run imports."""


def read_arguments(arguments: list[str]) -> tuple[configuration.Config]:
    """Parse the command line; returns the configuration. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="torchrun -m april.launch.sft", description=__doc__)
    parser.add_argument("config", nargs="+", type=Path, help="TOML file of the run; of several, later ones win")
    options, overrides = parser.parse_known_args(arguments)
    add_import_folders()
    config = configuration.load(options.config, overrides, own_parts=SFT_PARTS, supervised=True)
    add_import_folders(*config.run.parts)
    return (config,)


def train(config: configuration.Config) -> None:
    import torch.distributed as dist

    from april.launch.sft.held_out import HeldOutLoss
    from april.launch.sft.source import ConversationBook, ConversationSource
    from april.learner import loop, process_group
    from april.learner.batch import share_batch
    from april.learner.trainer import Trainer
    from april.util.pulse import MAIN, LoopWatch

    keep_private(config.run_dir)
    device = process_group.join(config.learner)
    rank = dist.get_rank()
    log_to_stderr(f"learner {rank}", config.operations.log_format, run=config.run.name, role="learner")
    log.info("rank %d of %d on %s", rank, dist.get_world_size(), device)
    source, waiting = None, process_group.long_wait_group()
    if rank == 0:
        MAIN.at("reading the rows", takes_long=True)
        LoopWatch(config.learner.hung_s, config.learner.load_s).start()
        source = ConversationSource(config, ConversationBook(config))
    (steps,) = loop.broadcast_integers((source.book.steps if source else 0,), waiting)
    held_out = share_batch(source.book.held_out_batch() if source else None, waiting)
    config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"max_steps": steps})})
    MAIN.at("loading the model", takes_long=True)
    trainer = Trainer(config, device)
    names = [each.name for each in config.evaluation_sets]
    groups = held_out.groups if held_out else []
    sets = dict(zip(names, groups, strict=True))
    publication = HeldOutLoss(trainer, sets, steps, source.evaluated if source else None)
    loop.run(config, trainer, source, None, publication=publication)
    process_group.leave()
    if source:
        source.close()
    log.info("rank %d is done", rank)


def main(arguments: list[str]) -> int:
    return run_rank("april.launch.sft", lambda: read_arguments(arguments), train)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
