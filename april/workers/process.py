"""Entry points of a worker and a scorer process (`april worker`, `april scorer`): build the parts and run the loop."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from april.config import Config
from april.config.checks import check_engine
from april.util import clock
from april.util.errors import refuse
from april.util.files import keep_private
from april.util.lifetime import REFUSED, SUPERVISED, exit_at_once, give_way
from april.util.logs import log_to_stderr
from april.util.pulse import LoopWatch
from april.util.time_sharing import TimeSliceLate
from april.wire.security.keys import load_keys
from april.wire.sockets.broker import new_uid
from april.workers.engines import ENGINES
from april.workers.engines.entry import device_of
from april.workers.rewards.sandbox import check_isolation

if TYPE_CHECKING:
    from april.wire.security.keys import Keys
    from april.workers.engines.base import Engine
    from april.workers.engines.weight_loading import WeightLoader
    from april.workers.scoring import Scorer
    from april.workers.worker import Worker

log = logging.getLogger(__name__)


def run_worker(config: Config, address: str, name: str) -> NoReturn:
    """Work for the broker at `address` until the run is over, then end the process.

    Raises ConfigError before the loop starts.
    """
    import torch

    from april.wire.sockets.broker import AccessDenied, BrokerConnection, BrokerUnreachable
    from april.workers.engines.base import EngineError
    from april.workers.time_sharing import WorkerTimeSharing
    from april.workers.worker import Worker

    keep_private(config.run_dir)
    log_to_stderr(name, config.operations.log_format, run=config.run.name, worker=name)
    torch.set_num_threads(config.worker.threads)
    device = device_of(config)
    if config.reward.where == "worker":
        check_isolation(config.reward.code_isolation)
    keys = load_keys(config.keys, "worker")
    turns = WorkerTimeSharing(config, device)
    try:
        turns.wait()
    except TimeSliceLate as error:
        print(f"april worker: {error}", file=sys.stderr)
        exit_at_once(1)
    engine = make_engine(config, device, name)
    log.info("connecting to %s", address)
    connection = BrokerConnection(address, "worker", name, new_uid(name), config.broker.patience_s, keys)
    worker = Worker(config, engine, connection, make_weight_loaders(config, engine, name, device, keys), turns)
    stop_at_signals(worker)
    LoopWatch(config.worker.hung_s, config.worker.hung_s).start()
    started_at, status = clock.now(), 0
    if device == "cpu" and SUPERVISED in os.environ and ENGINES.find(config.worker.engine).yields_cpu:
        give_way()  # only now: the start of a run waits for every part
    try:
        worker.run()
        log.info("%d tokens generated in %.1f s", engine.generated_tokens, clock.now() - started_at)
    except (BrokerUnreachable, EngineError) as error:
        print(f"april worker: {error}", file=sys.stderr)
        status = REFUSED if isinstance(error, AccessDenied) else 1
    worker.close()
    exit_at_once(status)


def run_scorer(config: Config, address: str, name: str) -> NoReturn:
    """Score for the broker at `address` until the run is over, then end the process.

    Raises ConfigError before the loop starts.
    """
    from april.wire.sockets.broker import AccessDenied, BrokerConnection, BrokerUnreachable
    from april.workers.scoring import Scorer

    if config.reward.where != "scorer":
        refuse("reward.where", config.reward.where, "leaves nothing to a scorer", "set it to 'scorer'")
    keep_private(config.run_dir)
    log_to_stderr(name, config.operations.log_format, run=config.run.name, worker=name)
    check_isolation(config.reward.code_isolation)
    keys = load_keys(config.keys, "scorer")
    log.info("connecting to %s", address)
    connection = BrokerConnection(address, "scorer", name, new_uid(name), config.broker.patience_s, keys)
    scorer, status = Scorer(config, connection), 0
    stop_at_signals(scorer)
    LoopWatch(config.scorer.hung_s, config.scorer.hung_s).start()
    try:
        scorer.run()
        log.info("%d responses or groups scored", scorer.scores)
    except BrokerUnreachable as error:
        print(f"april scorer: {error}", file=sys.stderr)
        status = REFUSED if isinstance(error, AccessDenied) else 1
    scorer.close()
    exit_at_once(status)


def stop_at_signals(part: "Worker | Scorer") -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: part.stop(f"signal {signal.Signals(number).name}"))


def make_weight_loaders(
    config: Config, engine: "Engine", name: str, device: str, keys: "Keys | None"
) -> "list[WeightLoader]":
    """The engine's weight loaders, one for each of its servers. `name`: the worker's name. `device`: "cuda" or "cpu".
    `keys`: the content of the worker's key file; None in a run without keys."""
    from april.weights import TRANSPORTS
    from april.weights.base import BaseWeights
    from april.weights.folders import SnapshotFolders
    from april.weights.puller import SnapshotPuller
    from april.weights.receiver import WeightReceiver
    from april.weights.source import WeightSource

    base = BaseWeights(config.model.path) if config.lora.is_set else None
    pulls = TRANSPORTS.find(config.weights.transport).pulls

    def make_source(
        channel: str,
        server: Any = None,
        up: Callable[[], bool] = lambda: True,
        adapts: Callable[[], bool] = lambda: False,
    ) -> WeightSource:
        if pulls:
            return SnapshotPuller(SnapshotFolders.to_read(config), config.weights.transfer_deadline_s, up)
        return WeightReceiver(config.weights, new_uid(channel), channel, device, keys, server, up, base, adapts)

    return ENGINES.find(config.worker.engine).weight_loaders(config, engine, name, make_source)


def make_engine(config: Config, device: str, name: str) -> "Engine":
    """The configured engine of worker `name`. Raises ConfigError."""
    check_engine(config)
    return ENGINES.find(config.worker.engine).from_config(config, device, name)
