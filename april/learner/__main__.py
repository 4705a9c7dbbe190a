"""One rank of the learner: `torchrun --nproc-per-node R -m april.learner CONFIG ... --connect ADDRESS`.

A rank that refuses to train (an error that a restart cannot fix) records so in torchrun's store, and ranks restarted
by torchrun exit at once. April's launcher restarts no rank that refused.
"""

import argparse
import logging
import sys
from functools import partial

from april import config as configuration
from april.learner.rank import run_rank
from april.util.files import keep_private
from april.util.logs import log_to_stderr
from april.util.registry import REGISTRIES, add_import_folders
from april.wire.security.keys import load_keys

log = logging.getLogger(__name__)

LEARNER_PARTS = [key for key in REGISTRIES if key.startswith(("learner.", "algorithm.", "weights."))]
"""Configuration keys whose values name classes or functions that the learner imports, among them a user's own."""

HELP = """Trains batches from the broker and publishes the weights to the workers.
Rank 0 talks to the broker and to the workers; all ranks share the step. A run that has checkpoints goes on
from the newest one. Overrides are written as --section.key value."""


def read_arguments(arguments: list[str]) -> tuple[configuration.Config, str]:
    """Parse the command line; returns the configuration and the broker's address or run folder. Raises ConfigError, and
    TimeoutError where the run folder has no broker."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m april.learner",
        description=HELP,
        epilog=configuration.OVERRIDES + configuration.describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="+", help="TOML file of the run; of several, later ones win")
    parser.add_argument(
        "--connect", required=True, metavar="ADDRESS", help="the broker's, as tcp://HOST:PORT, or its run folder"
    )
    options, overrides = parser.parse_known_args(arguments)
    add_import_folders()
    config = configuration.load(options.config, overrides, inputs=["model", "conversations"], own_parts=LEARNER_PARTS)
    add_import_folders(*config.run.parts)
    return configuration.with_run_keys(config, configuration.check_address(options.connect)), options.connect


def main(arguments: list[str]) -> int:
    return run_rank("april.learner", lambda: read_arguments(arguments), train)


def train(config: configuration.Config, address: str) -> None:
    import torch.distributed as dist

    from april.learner import loop, process_group
    from april.learner.conversations import BatchConversations
    from april.learner.publication import DividedSending
    from april.learner.snapshot_writing import SnapshotWriting
    from april.learner.source import BrokerSource
    from april.learner.time_sharing import TimeSlice
    from april.learner.token_stats import keeps_samples
    from april.learner.trainer import Trainer
    from april.util.pulse import MAIN, LoopWatch
    from april.weights import TRANSPORTS
    from april.weights.publisher import WeightPublisher
    from april.weights.transports import weights_towards
    from april.wire.sockets.base import address_at

    keep_private(config.run_dir)
    device = process_group.join(config.learner)
    rank = dist.get_rank()
    log_to_stderr(f"learner {rank}", config.operations.log_format, run=config.run.name, role="learner")
    log.info("rank %d of %d on %s", rank, dist.get_world_size(), device)
    source = publisher = None
    if rank == 0:
        MAIN.at("loading the model", takes_long=True)
        LoopWatch(config.learner.hung_s, config.learner.load_s).start()
        keys = config.keys
        address = address_at(address, config.broker.patience_s)
        if not TRANSPORTS.find(config.weights.transport).pulls:
            publisher = WeightPublisher(weights_towards(config, address), config.run.name, device.type, keys, address)
        conversations = BatchConversations(config) if config.data.sft_sources else None
        source = BrokerSource(
            address, publisher.address if publisher else "", config.broker.patience_s, load_keys(keys, "learner"),
            keeps_samples=partial(keeps_samples, config.samples),
            with_conversations=conversations.beside if conversations else None,
        )  # fmt: skip
    time_slice = TimeSlice(config, device, rank)
    time_slice.acquire()
    trainer = Trainer(config, device)
    snapshots = SnapshotWriting.start(config, source.weights_written if source else None)
    divided = None if snapshots else DividedSending.start(trainer, publisher)
    loop.run(config, trainer, source, publisher, time_slice, divided, snapshots=snapshots)
    if divided:
        divided.close()
    process_group.leave()
    if source:
        source.close()
    if publisher:
        publisher.close()
    log.info("rank %d is done", rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
