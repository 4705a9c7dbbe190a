"""Many workers for a long time: what a thousand sessions and a hundred thousand samples cost the broker.

Each session reports the new tokens of its share of the samples once a tick; a finished sample is scored and replaced at
once, a learner consumes every batch.
"""

import os
import statistics
import sys
import time
from ctypes import c_long
from dataclasses import replace
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

from common import Row, processor_s

from april import wire
from april.observe.operate import content

from .april_side import PATIENCE_S, Member, consume, serving, write_run
from .load import BenchmarkError, Crew, Load
from .stream import GROUP_SIZE, PROMPT_TOKENS, Stream, run_sessions, schedule

BATCH_GROUPS = 256
RSS_EVERY_S = 1.0
FILL_S = 400.0
"""Longest wait for all samples to be in flight, once all sessions have come (seconds)."""
QUICK = Stream(100, 20, mean_chunks=4, chunks_per_s=2_000, processes=4, joining_s=7, warmup_s=20, window_s=20)
RATE = 30_000
"""Chunks a second that two cores carry, with the load, and little more."""


def whole(chunks_per_s: float = RATE) -> Stream:
    """Sessions come over as long as the longest response takes, so that responses end as evenly as they do later; where
    all begin at once, groups end at once. The warm-up begins when all samples are in flight."""
    stream = Stream(1000, 100, chunks_per_s=chunks_per_s, processes=4, warmup_s=60, window_s=600)
    return replace(stream, joining_s=stream.tick_s * stream.longest / stream.tokens)


def endure(stream: Stream, folder: Path) -> list[Row]:
    """Rows of the soak. Bytes of a sample or session are what resident memory has grown by since there was none: of a
    sample over the first tenth of the window, for each in workers' hands, or for each that the ledger holds (those too
    that wait for their group, or with it for a batch)."""
    config = write_run(folder, schedule(stream, BATCH_GROUPS), stream.longest, prompt_tokens=PROMPT_TOKENS)
    with serving(config) as broker, Crew() as crew:
        address, frontier, granting = broker.address(), RawValue(c_long, 0), RawValue("b", 0)
        alone = rss_bytes(broker.pid)
        in_flight = [RawValue(c_long, 0) for _ in range(stream.processes)]
        crew.add(consume, address, frontier)
        for number in range(stream.processes):
            crew.add(run_sessions, address, number, stream, frontier, granting, in_flight[number], True)
        crew.all_ready(within_s=600.0)
        before = rss_bytes(broker.pid)
        granting.value = 1
        wait_until_all(in_flight, stream, crew)
        crew.watch(stream.warmup_s)
        started_s, rss, in_hands, held = processor_s(broker.pid), [], [], []
        crew.window.open(stream.window_s)
        while not crew.window.over():
            rss.append(rss_bytes(broker.pid))
            in_hands.append(sum(count.value for count in in_flight))
            if len(rss) * RSS_EVERY_S >= (len(held) + 1) * stream.window_s / 10:
                held.append(look(address, rss[-1], in_hands[-1]))
            crew.watch(RSS_EVERY_S)
        used_s = processor_s(broker.pid) - started_s
        _, *results = crew.work(Load(stream.sessions, 1, 0.0, warmup_s=0.0))
    tenth, chunks = max(1, len(rss) // 10), sum(count for count, _ in results)
    first, last = statistics.median(rss[:tenth]), statistics.median(rss[-tenth:])
    return [
        Row("rss_growth_ratio_10min", [last / first], "ratio"),
        Row("bytes_per_inflight_sample", [(first - before) / statistics.median(in_hands[:tenth])], "bytes"),
        Row("bytes_per_held_sample", [(first - before) / held[0]], "bytes"),
        Row("bytes_per_session", [(before - alone) / stream.sessions], "bytes"),
        Row("cpu_us_per_chunk", [used_s / chunks * 1e6], "us"),
        Row("soak_chunks_per_s", [chunks / stream.window_s], "chunks/s"),
        Row("soak_rss_mib", [last / 2**20], "MiB"),
        Row("soak_least_in_flight", [min(in_hands)], "samples"),
    ]


def wait_until_all(in_flight, stream: Stream, crew: Crew) -> None:
    """Wait until all samples but those that are being replaced are in flight."""
    longest_s = stream.joining_s + FILL_S
    deadline = time.monotonic() + longest_s
    while (held := sum(count.value for count in in_flight)) < 0.95 * stream.in_flight:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"only {held} of {stream.in_flight} samples are in flight after {longest_s:g} s")
        crew.watch(0.1)


def look(address: str, rss: int, in_hands: int) -> int:
    """Say where samples are; how many the ledger holds, but those of the batch that the learner has."""
    member = Member(address, "monitor", "looks")
    status = content(member.connection.request(wire.StatusRequest(), PATIENCE_S))
    member.leave()
    states, ready = status["queues"]["training"], GROUP_SIZE * status["groups_complete"]
    of_open = ", ".join(f"{state} {count:,}" for state, count in states.items())
    print(
        f"  {in_hands:,} in flight; of open groups {of_open}; of complete ones {ready:,}; batch {status['step']}; "
        f"{rss >> 20} MiB",
        file=sys.stderr,
        flush=True,
    )
    return sum(states.values()) + ready


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
