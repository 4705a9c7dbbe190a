"""One rank of the learner: `torchrun --nproc-per-node R -m april.learner CONFIG ... --connect ADDRESS`.

A rank that refuses to train (an error that a restart cannot fix) records so in torchrun's store, and ranks restarted
by torchrun exit at once. April's launcher restarts no rank that refused.
"""

import argparse
import contextlib
import logging
import os
import sys
from functools import partial

from april import config as configuration
from april.learner.launch import RESTARTS
from april.util.files import keep_private
from april.util.lifetime import REFUSED, die_with_parent, exit_at_once
from april.util.logs import log_to_stderr
from april.util.registry import REGISTRIES, add_import_folders
from april.util.time_sharing import TimeSliceLate
from april.wire.security.keys import load_keys
from april.wire.sockets.broker import AccessDenied, BrokerRefused, BrokerUnreachable

log = logging.getLogger(__name__)

# --- refusals across restarts -----------------------------------------------------------------------------------------

LEARNER_PARTS = [key for key in REGISTRIES if key.startswith(("learner.", "algorithm.", "weights."))]
"""Configuration keys that name parts which the learner imports."""
REFUSED_KEY = "april/refused"
STORE_TIMEOUT_S = 10


def remember_refusal() -> None:
    """Record in torchrun's store that this rank refused to train, so that ranks restarted by torchrun exit at once."""
    if is_under_torchrun():
        with contextlib.suppress(RuntimeError):
            torchrun_store().set(REFUSED_KEY, "")


def refusal_is_remembered() -> bool:
    return is_under_torchrun() and int(os.environ[RESTARTS]) > 0 and torchrun_store().check([REFUSED_KEY])


def is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def torchrun_store():
    from april.weights import channel

    return channel.connect_to_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), STORE_TIMEOUT_S)


# --- the rank ---------------------------------------------------------------------------------------------------------

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
    config = configuration.load(options.config, overrides, inputs=["model"], own_parts=LEARNER_PARTS)
    add_import_folders(*config.run.parts)
    return configuration.with_run_keys(config, configuration.check_address(options.connect)), options.connect


def main(arguments: list[str]) -> int:
    die_with_parent()
    if refusal_is_remembered():
        return REFUSED
    try:
        config, connect = read_arguments(arguments)
    except configuration.ConfigError as error:
        print(f"april.learner: {error}", file=sys.stderr)
        status = REFUSED
    except TimeoutError as error:
        print(f"april.learner: {error}", file=sys.stderr)
        status = 1
    else:
        status = status_of_training(config, connect)
    if status == REFUSED:
        remember_refusal()
    exit_at_once(status)


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

    from april.learner import loop, process_group
    from april.learner.publication import DividedSending
    from april.learner.source import BrokerSource
    from april.learner.time_sharing import TimeSlice
    from april.learner.token_stats import keeps_samples
    from april.learner.trainer import Trainer
    from april.util.pulse import MAIN, LoopWatch
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
        publisher = WeightPublisher(weights_towards(config, address), config.run.name, device.type, keys, address)
        source = BrokerSource(
            address, publisher.address, config.broker.patience_s, load_keys(keys, "learner"),
            keeps_samples=partial(keeps_samples, config.samples),
        )  # fmt: skip
    time_slice = TimeSlice(config, device, rank)
    time_slice.acquire()
    trainer = Trainer(config, device)
    divided = DividedSending.start(trainer, publisher)
    loop.run(config, trainer, source, publisher, time_slice, divided)
    if divided:
        divided.close()
    process_group.leave()
    if source and publisher:
        source.close()
        publisher.close()
    log.info("rank %d is done", rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
