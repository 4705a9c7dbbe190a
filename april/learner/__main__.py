"""One rank of the learner: `torchrun --nproc-per-node R -m april.learner CONFIG ... --connect ADDRESS`."""

import argparse
import logging
import sys
from functools import partial

from april import config as configuration
from april.connections.broker import AccessDenied, BrokerRefused, BrokerUnreachable
from april.learner import refusal
from april.processes.device_turns import TimeSliceLate
from april.processes.lifetime import REFUSED, die_with_parent, end
from april.processes.logs import log_to_stderr
from april.registry import add_import_folders
from april.security.keys import load_keys

log = logging.getLogger(__name__)

HELP = """Trains batches from the broker and publishes the weights to the workers.
Rank 0 talks to the broker and to the workers; all ranks share the step. A run that has checkpoints goes on
from the newest one. Overrides are written as --section.key value."""


def read_arguments(arguments: list[str]) -> tuple[configuration.Config, str]:
    """The configuration and the broker's address or run folder. Raises ConfigError."""
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
    config = configuration.load(options.config, overrides, inputs=["model"])
    add_import_folders(*config.run.parts)
    configuration.check_address(options.connect)
    return config, options.connect


def main(arguments: list[str]) -> int:
    die_with_parent()
    if refusal.is_remembered():
        return REFUSED
    try:
        config, connect = read_arguments(arguments)
    except configuration.ConfigError as error:
        print(f"april.learner: {error}", file=sys.stderr)
        status = REFUSED
    else:
        status = status_of_training(config, connect)
    if status == REFUSED:
        refusal.remember()
    end(status)


def status_of_training(config: configuration.Config, address: str) -> int:
    """Train; returns the exit status: 0, REFUSED for errors that a restart cannot fix, otherwise 1."""
    from april.learner.attention import PackedAttentionError
    from april.learner.loading import ModelError
    from april.learner.loop import Diverged

    try:
        train(config, address)
    except (
        configuration.ConfigError,
        BrokerUnreachable,
        BrokerRefused,
        Diverged,
        ModelError,
        PackedAttentionError,
        TimeSliceLate,
    ) as error:
        print(f"april.learner: {error}", file=sys.stderr)
        passes = isinstance(error, (BrokerUnreachable, TimeSliceLate)) and not isinstance(error, AccessDenied)
        return 1 if passes else REFUSED
    except Exception:
        log.exception("the learner cannot go on")
        return 1
    return 0


def train(config: configuration.Config, address: str) -> None:
    import torch.distributed as dist

    from april.connections.address import address_at
    from april.learner import loop, process_group
    from april.learner.device_turns import TimeSlice
    from april.learner.seen import keeps_samples
    from april.learner.source import BrokerSource
    from april.learner.trainer import Trainer
    from april.processes.pulse import MAIN, LoopWatch
    from april.weights.publisher import WeightPublisher, weights_towards

    device = process_group.join(config.learner)
    rank = dist.get_rank()
    log_to_stderr(f"learner {rank}", config.operations.log_format, run=config.run.name, role="learner")
    log.info("rank %d of %d on %s", rank, dist.get_world_size(), device)
    source = publisher = None
    if rank == 0:
        MAIN.at("loading the model", takes_long=True)
        LoopWatch(config.learner.hung_s, config.learner.load_s).start()
        keys = config.security.keys
        address = address_at(address, config.broker.patience_s)
        publisher = WeightPublisher(weights_towards(config, address), config.run.name, device.type, keys)
        source = BrokerSource(
            address, publisher.address, config.broker.patience_s, load_keys(keys, "learner"),
            keeps_samples=partial(keeps_samples, config.samples),
        )  # fmt: skip
    time_slice = TimeSlice(config, device, rank)
    time_slice.acquire()
    loop.run(config, Trainer(config, device), source, publisher, time_slice)
    process_group.leave()
    if source and publisher:
        source.close()
        publisher.close()
    log.info("rank %d is done", rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
