"""The broker under its loads, durable, on loopback, and Redis under the same stream of chunks.

Sides take turns, each time with new processes and an empty disk; a ratio is of two turns that follow each other.
"""

import contextlib
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from broker_peers import restart, soak, stream, worker_side
from broker_peers.load import BenchmarkError
from broker_peers.stream import Stream, Streamed
from common import Row, in_turns, parser, report

TURNS = 3
STREAMS = (Stream(16, 256), Stream(64, 64), Stream(1000, 100, window_s=20.0, warmup_s=40.0))
"""Workers and the sequences of each."""
ONE_WORKER = Stream(1, 256)
GPU_SEQUENCES, REPORT_S, CORE_SHARE = 256, 2.0, 0.7
"""Sequences of a GPU, the default of `worker.report_s`, and the share of a core that a broker may take."""


class Turns:
    """How often and for how long; every turn gets a folder of its own."""

    def __init__(self, folder: Path | None, quick: bool, soak_rate: float = soak.RATE):
        self.folder, self.quick, self.soak_rate = folder, quick, soak_rate

    def count(self) -> range:
        return range(1 if self.quick else TURNS)

    @contextlib.contextmanager
    def folder_of_its_own(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="april-broker-", dir=self.folder) as folder:
            os.sync()
            yield Path(folder)

    def take(self, side: Callable, load: Stream, **options) -> Streamed:
        with self.folder_of_its_own() as folder:
            run = side(replace(load, window_s=2.0) if self.quick else load, folder, **options)
        figures = (
            f"{run.chunks_per_s:,.0f} chunks/s, submit p99 {p99(run.submit_ms):.0f} ms, server {run.cpu_us:.1f} us"
        )
        print(f"  {side.__module__.rpartition('.')[2]} {load}: {figures} a chunk", file=sys.stderr, flush=True)
        return run


def p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99))


def compare(turns: Turns, load: Stream, ours: Callable, theirs: Callable) -> list[tuple[Streamed, Streamed]]:
    """Pairs (ours, theirs), taking turns at going first."""
    pairs = []
    for turn in turns.count():
        results = {side: turns.take(side, load) for side in in_turns(turn, ours, theirs)}
        pairs.append((results[ours], results[theirs]))
    return pairs


# --- the figures ----------------------------------------------------------------------------------------------


def batched_rows(turns: Turns) -> list[Row]:
    from broker_peers import redis_stream

    rows: list[Row] = []
    wide, *others = STREAMS
    pairs = compare(turns, wide, stream.measure, redis_stream.measure)
    rows += [
        Row("redis_ratio_stream", [ours.chunks_per_s / theirs.chunks_per_s for ours, theirs in pairs], "ratio"),
        Row(f"stream_redis_{wide}", [theirs.chunks_per_s for _, theirs in pairs], "chunks/s"),
        Row(f"stream_redis_us_{wide}", [theirs.cpu_us for _, theirs in pairs], "us"),
        *stream_rows(wide, [ours for ours, _ in pairs]),
    ]
    for load in others[:0] if turns.quick else others:
        rows += stream_rows(load, [turns.take(stream.measure, load) for _ in turns.count()])
    half = replace(wide, chunks_per_s=float(np.median([ours.chunks_per_s for ours, _ in pairs])) / 2)
    paced = [turns.take(stream.measure, half, pings=True) for _ in turns.count()]
    rows.append(Row("submit_p99_ms_stream", [p99(run.submit_ms) for run in paced], "ms"))
    rows.append(Row("control_p99_ms_stream", [p99(run.round_trips_ms) for run in paced], "ms"))
    return rows


def stream_rows(load: Stream, runs: list[Streamed]) -> list[Row]:
    """GPUs a broker: a sequence makes a chunk every `REPORT_S`, of as many tokens as it samples meanwhile."""
    chunks_per_gpu = GPU_SEQUENCES / REPORT_S
    return [
        Row(f"stream_{load}", [run.chunks_per_s for run in runs], "chunks/s"),
        Row(f"cpu_us_per_chunk_{load}", [run.cpu_us for run in runs], "us"),
        Row(f"gpus_per_broker_{load}", [CORE_SHARE * 1e6 / run.cpu_us / chunks_per_gpu for run in runs], "GPUs"),
    ]


def restart_rows(turns: Turns) -> list[Row]:
    size_bytes, samples = (600_000_000, 10_000) if turns.quick else (10_000_000_000, 100_000)
    with turns.folder_of_its_own() as folder:
        config, tokens = restart.make_journal(folder, size_bytes, samples)
        seconds = [restart.restart_s(config, tokens) for _ in turns.count()]
    return [Row("restart_10gb_s", seconds, "s")]


def soak_rows(turns: Turns) -> list[Row]:
    load = soak.QUICK if turns.quick else soak.whole(turns.soak_rate)
    with turns.folder_of_its_own() as folder:
        return soak.endure(load, folder)


def worker_rows(turns: Turns) -> list[Row]:
    microseconds = []
    for _ in turns.count():
        with turns.folder_of_its_own() as folder:
            microseconds.append(worker_side.measure(ONE_WORKER, folder))
    return [Row("worker_cpu_us_per_chunk", microseconds, "us")]


FIGURES: dict[tuple[str, ...], Callable[[Turns], list[Row]]] = {
    ("restart_10gb_s",): restart_rows,
    ("worker_cpu_us_per_chunk",): worker_rows,
    ("redis_ratio_stream", "cpu_us_per_chunk_16x256", "gpus_per_broker_16x256", "submit_p99_ms_stream"): batched_rows,
}
"""Measurements by the names of their rows with a goal."""
SOAK = {("rss_growth_ratio_10min", "bytes_per_inflight_sample", "cpu_us_per_chunk"): soak_rows}


def allow_many_sockets() -> None:
    """A thousand sessions need two connections each; children inherit the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("benchmarks/broker.py: stopped"))
    arguments = parser(__doc__.partition("\n")[0])
    names = [name for together in FIGURES | SOAK for name in together]
    arguments.add_argument("--only", nargs="+", choices=names, metavar="ROW", help=f"of: {', '.join(names)}")
    arguments.add_argument("--folder", type=Path, help="where journals are written [default: for temporary files]")
    arguments.add_argument("--soak", action="store_true", help="only the long form: 1,000 sessions for 10 minutes")
    arguments.add_argument(
        "--soak-rate", type=float, default=soak.RATE, metavar="N", help=f"its chunks/s [default {soak.RATE:,}]"
    )
    options = arguments.parse_args()
    turns, rows = Turns(options.folder, options.quick, options.soak_rate), []
    figures = SOAK if options.soak else FIGURES
    if options.only:
        figures = {names: figure for names, figure in (FIGURES | SOAK).items() if set(names) & set(options.only)}
    allow_many_sockets()
    try:
        for figure in figures.values():
            rows += figure(turns)
    except BenchmarkError as error:
        sys.exit(f"benchmarks/broker.py: {error}")
    report(rows, options.json)


if __name__ == "__main__":
    main()
