"""A worker process, engine, connection and weights put together, and a scorer's; `april worker`, `april scorer`."""

import logging
import os
import signal
import sys
import uuid
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from april import clock
from april.config import Config, ConfigError
from april.devices import wanted
from april.process import REFUSED, SUPERVISED, end, give_way, log_to_stderr
from april.security.keys import load_keys

if TYPE_CHECKING:
    from april.security.keys import Keys
    from april.workers.engines.base import Engine
    from april.workers.intake import Intake
    from april.workers.scorer import Scorer
    from april.workers.worker import Worker

log = logging.getLogger(__name__)


def run_worker(config: Config, address: str, name: str) -> NoReturn:
    """Work for the broker at `address` until the run is over, then end the process. Raises ConfigError before."""
    import torch

    from april.client import AccessDenied, BrokerConnection, BrokerUnreachable
    from april.workers.engines.base import EngineError
    from april.workers.worker import Worker

    log_to_stderr(name, config.operations.log_format, run=config.run.name, worker=name)
    torch.set_num_threads(config.worker.threads)
    device = device_of(config)
    if device == "cpu" and SUPERVISED in os.environ:
        give_way()
    keys = load_keys(config.security.keys, "worker")
    engine = make_engine(config, device, name)
    uid = uuid.uuid4().hex
    log.info("connecting to %s", address)
    connection = BrokerConnection(address, "worker", name, uid, config.broker.patience_s, keys)
    worker = Worker(config, engine, connection, make_intakes(config, engine, uid, name, device, keys))
    stop_at_signals(worker)
    started_at, status = clock.now(), 0
    try:
        worker.run()
        log.info("%d tokens generated in %.1f s", engine.generated_tokens, clock.now() - started_at)
    except (BrokerUnreachable, EngineError) as error:
        print(f"april worker: {error}", file=sys.stderr)
        status = REFUSED if isinstance(error, AccessDenied) else 1
    worker.close()
    end(status)


def run_scorer(config: Config, address: str, name: str) -> NoReturn:
    """Score for the broker at `address` until the run is over, then end the process. Raises ConfigError before."""
    from april.client import AccessDenied, BrokerConnection, BrokerUnreachable
    from april.workers.scorer import Scorer

    if config.reward.where != "scorer":
        raise ConfigError(
            f"key 'reward.where' = {config.reward.where!r} leaves nothing to a scorer; set it to 'scorer'"
        )
    log_to_stderr(name, config.operations.log_format, run=config.run.name, worker=name)
    keys = load_keys(config.security.keys, "scorer")
    log.info("connecting to %s", address)
    connection = BrokerConnection(address, "scorer", name, uuid.uuid4().hex, config.broker.patience_s, keys)
    scorer, status = Scorer(config, connection), 0
    stop_at_signals(scorer)
    try:
        scorer.run()
        log.info("%d responses or groups scored", scorer.scores)
    except BrokerUnreachable as error:
        print(f"april scorer: {error}", file=sys.stderr)
        status = REFUSED if isinstance(error, AccessDenied) else 1
    scorer.close()
    end(status)


def stop_at_signals(part: "Worker | Scorer") -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: part.stop(f"signal {signal.Signals(number).name}"))


def make_intakes(
    config: Config, engine: "Engine", uid: str, name: str, device: str, keys: "Keys | None"
) -> "list[Intake]":
    """A lane to the learner for the engine, or for each server behind it; where the learner broadcasts to a server
    itself, that takes the worker's place in its lane."""
    from april.weights.receiver import WeightReceiver
    from april.workers.intake import Intake, ServerIntake

    if config.worker.engine == "torch":
        return [Intake(engine, WeightReceiver(config.weights, uid, name, device, keys))]

    from april.workers.engines.sglang_lane import ServerLane

    intakes = []
    for lane, part in zip(config.lanes_of(name), engine.parts, strict=True):
        server = ServerLane(part) if config.broadcasts_to_servers else None
        up = partial(getattr, part, "ready")
        receiver = WeightReceiver(config.weights, f"{uid}-{lane}", lane, device, keys, server, up)
        intakes.append(ServerIntake(part, receiver))
    return intakes


def device_of(config: Config) -> str:
    """What a worker's engine runs on here, "cuda" or "cpu". Raises ConfigError."""
    import torch

    device = config.worker.device if wanted(config)[1] else "cpu"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("key 'worker.device' = 'cuda' finds no accelerator here; use 'auto' or 'cpu'")
    return device


def make_engine(config: Config, device: str, name: str) -> "Engine":
    """`name`: of the worker. Raises ConfigError."""
    from april.workers.engines.base import EngineError
    from april.workers.engines.torch_engine import TorchEngine

    if config.worker.engine == "sglang":
        from april.workers.engines.sglang_engine import make_sglang_engine

        return make_sglang_engine(config, device, name)
    if config.worker.engine == "vllm":
        from april.workers.engines.vllm_engine import make_vllm_engine

        return make_vllm_engine(config, device, name)

    try:
        return TorchEngine(
            config.model.path,
            slots=config.worker.slots,
            device=device,
            chunk_tokens=config.worker.chunk_tokens,
            chunk_s=config.worker.chunk_s,
            keep_cache=config.engine.pause == "in_place",
        )
    except EngineError as error:
        raise ConfigError(f"key 'model.path' = {str(config.model.path)!r} cannot be used: {error}") from None
