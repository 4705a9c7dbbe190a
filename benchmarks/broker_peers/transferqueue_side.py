"""TransferQueue, verl's data plane: a controller and storage units are Ray actors; clients put, read and clear rows.

Each client does all three with the rows that it has made, so many at a time: prompts, leases and scores are left out.
Nothing of it is durable. Its sizes and settings are those of its own defaults.
"""

import importlib.util
import os
import time
from pathlib import Path

import numpy as np

from .load import RECORD_TOKENS, BenchmarkError, Load, Measured, in_own_process, record
from .stream import Stream, Streamed

STREAM_CLIENTS, STREAM_ROWS = 4, 64
"""Clients of the stream, and rows that each puts at once."""
STORE_BYTES = 1 << 30
NAMESPACE = "transfer_queue"


def measure(load: Load, folder: Path) -> Measured:
    """Records of 64 KB; without the processor time of its servers."""
    rate, put_ms = _apart(load.producers, load.in_flight, RECORD_TOKENS, load.window_s, load.warmup_s, folder)
    return Measured(rate, put_ms, float("nan"))


def measure_stream(stream: Stream, folder: Path) -> Streamed:
    """Rows of as many tokens as a chunk of the stream has."""
    rate, put_ms = _apart(STREAM_CLIENTS, STREAM_ROWS, stream.tokens, stream.window_s, stream.warmup_s, folder)
    return Streamed(rate, float("nan"), put_ms, np.empty(0))


def _apart(clients: int, rows: int, tokens: int, window_s: float, warmup_s: float, folder: Path):
    """Rows/s of a new queue, and float [puts]: put times, ms. Ray starts and ends with a process of its own."""
    if importlib.util.find_spec("transfer_queue") is None:
        raise BenchmarkError("transferqueue is not installed; `pip install 'april-rl[bench]'` brings it")
    return in_own_process(_drive, clients, rows, tokens, window_s, warmup_s, folder)


def _drive(tell, clients: int, rows: int, tokens: int, window_s: float, warmup_s: float, folder: Path) -> None:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=str(Path(__file__).parents[1]))
    import ray
    import transfer_queue

    ray.init(
        num_cpus=64, include_dashboard=False, log_to_driver=False, object_store_memory=STORE_BYTES,
        logging_level="error", _temp_dir=str(folder), namespace=NAMESPACE,
    )  # fmt: skip
    try:
        transfer_queue.init()
        crew = [ray.remote(num_cpus=0)(Client).remote(number, rows, tokens) for number in range(clients)]
        ray.get([client.ready.remote() for client in crew])
        start = time.monotonic() + warmup_s
        done = ray.get([client.run.remote(start, start + window_s) for client in crew])
        tell((sum(len(put_ms) for put_ms in done) * rows / window_s, np.concatenate(done)))
        transfer_queue.close()
    finally:
        ray.shutdown()


class Client:
    def __init__(self, number: int, rows: int, tokens: int):
        self.number, self.rows = number, rows
        self.columns = [np.tile(column[:tokens], (rows, 1)) for column in record(number)]

    def ready(self) -> None:
        import transfer_queue

        transfer_queue.init()

    def run(self, start: float, end: float) -> np.ndarray:
        """Put times of the window: float [puts], ms."""
        import torch
        import transfer_queue
        from tensordict import TensorDict

        ids, logprobs = map(torch.from_numpy, self.columns)
        partition, put_ms, turn, now = f"client{self.number}", [], 0, 0.0
        while now < end:
            keys = [f"{turn}-{row}" for row in range(self.rows)]
            sent_at = time.monotonic()
            fields = TensorDict({"ids": ids, "logprobs": logprobs}, batch_size=self.rows)
            transfer_queue.kv_batch_put(keys, partition, fields)
            taken = time.monotonic()
            read = transfer_queue.kv_batch_get(keys, partition)
            if not all(map(torch.equal, read["ids"].unbind(), ids)):
                raise BenchmarkError("what was read is not what was put")
            transfer_queue.kv_clear(keys, partition)
            turn, now = turn + 1, time.monotonic()
            if start <= now < end:
                put_ms.append((taken - sent_at) * 1000)
        return np.array(put_ms)
