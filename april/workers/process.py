"""A worker process, engine, connection and weights put together, and a scorer's; `april worker`, `april scorer`."""

import logging
import signal
import sys
import uuid
from typing import TYPE_CHECKING, NoReturn

from april import clock
from april.config import Config, ConfigError
from april.process import REFUSED, end, log_to_stderr
from april.security.keys import load_keys

if TYPE_CHECKING:
    from april.weights.receiver import InferenceServer
    from april.workers.engines.base import Engine
    from april.workers.scorer import Scorer
    from april.workers.worker import Worker

log = logging.getLogger(__name__)


def run_worker(config: Config, address: str, name: str) -> NoReturn:
    """Work for the broker at `address` until the run is over, then end the process. Raises ConfigError before."""
    import torch

    from april.client import AccessDenied, BrokerConnection, BrokerUnreachable
    from april.weights.receiver import WeightReceiver
    from april.workers.engines.base import EngineError
    from april.workers.worker import Worker

    log_to_stderr(name, config.operations.log_format, run=config.run.name, worker=name)
    torch.set_num_threads(config.worker.threads)
    device = config.worker.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("key 'worker.device' = 'cuda' finds no accelerator here; use 'auto' or 'cpu'")
    keys = load_keys(config.security.keys, "worker")
    engine = make_engine(config, device, name)
    uid = uuid.uuid4().hex
    log.info("connecting to %s", address)
    connection = BrokerConnection(address, "worker", name, uid, config.broker.patience_s, keys)
    receiver = WeightReceiver(config.weights, uid, name, device, keys, make_server_lane(config, engine))
    worker = Worker(config, engine, connection, receiver)
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


def make_server_lane(config: Config, engine: "Engine") -> "InferenceServer | None":
    """What joins the learner's lanes in the worker's place, where the learner broadcasts to the server itself."""
    if config.worker.engine != "sglang" or config.engine.weights != "broadcast":
        return None
    from april.workers.engines.sglang_lane import ServerLane

    return ServerLane(engine, config.engine.tensor_ranks)


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
        )
    except EngineError as error:
        raise ConfigError(f"key 'model.path' = {str(config.model.path)!r} cannot be used: {error}") from None
