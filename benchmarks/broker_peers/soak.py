"""Many workers for a long time: what a thousand sessions and a hundred thousand samples cost the broker.

Each session reports the new tokens of its share of the samples once a tick; a finished sample is scored and replaced at
once, a learner consumes every batch.
"""

import os
import statistics
import sys
import time
from ctypes import c_long
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

from april import wire
from april.observe.operate import content

from .april_side import PATIENCE_S, Door, Member, consume, serving, write_run
from .load import BenchmarkError, Crew, Load, cpu_s
from .stream import GROUP_SIZE, PROMPT_TOKENS, Stream, attend, schedule

BATCH_GROUPS = 256
RSS_EVERY_S = 1.0
FILL_S = 400.0
"""longest wait for all samples to be in flight, once all sessions have come"""
QUICK = Stream(100, 20, mean_chunks=4, chunks_per_s=2_000, processes=4, joining_s=7, warmup_s=20, window_s=20)
RATE = 30_000
"""chunks a second that two cores carry on both sides, and little more"""


def whole(chunks_per_s: float = RATE) -> Stream:
    """Sessions come over as long as the longest response takes, so that responses end as evenly as they do later; where
    all begin at once, groups end at once. The warm-up begins when all samples are in flight."""
    crowd = Stream(1000, 100, chunks_per_s=chunks_per_s, processes=4, warmup_s=60, window_s=600)
    return replace(crowd, joining_s=crowd.tick_s * crowd.longest / crowd.tokens)


@dataclass(frozen=True)
class Endured:
    rss_growth: float
    """resident memory in the last tenth of the window over that in its first tenth"""
    bytes_per_sample: float
    """resident memory in the first tenth of the window, less that with only the sessions, for each sample that is in
    workers' hands meanwhile"""
    bytes_per_held: float
    """the same for each sample that the ledger holds then: those too that have ended and wait for their group, or with
    it for a batch"""
    bytes_per_session: float
    """resident memory with only the sessions, whose connections have been used, less that without, for each"""
    cpu_us_per_chunk: float
    """all that the broker did in the window over the chunks in it"""
    chunks_per_s: float
    rss_mib: float
    least_in_flight: int
    """samples in workers' hands, at any look during the window"""


def endure(crowd: Stream, folder: Path) -> Endured:
    config = write_run(folder, schedule(crowd, BATCH_GROUPS), crowd.longest, prompt_tokens=PROMPT_TOKENS)
    with serving(config) as broker, Crew() as crew:
        address, frontier, granting = broker.address(), RawValue(c_long, 0), RawValue("b", 0)
        alone = rss_bytes(broker.pid)
        in_flight = [RawValue(c_long, 0) for _ in range(crowd.processes)]
        crew.add(consume, Door(address), frontier)
        for number in range(crowd.processes):
            crew.add(attend, address, number, crowd, frontier, granting, in_flight[number], True)
        crew.all_ready(within_s=600.0)
        before = rss_bytes(broker.pid)
        granting.value = 1
        wait_until_all(in_flight, crowd, crew)
        crew.watch(crowd.warmup_s)
        started_s, rss, in_hands, held = cpu_s(broker.pid), [], [], []
        crew.window.open(crowd.window_s)
        while not crew.window.over():
            rss.append(rss_bytes(broker.pid))
            in_hands.append(sum(count.value for count in in_flight))
            if len(rss) * RSS_EVERY_S >= (len(held) + 1) * crowd.window_s / 10:
                held.append(look(address, rss[-1], in_hands[-1]))
            crew.watch(RSS_EVERY_S)
        used_s = cpu_s(broker.pid) - started_s
        _, *results = crew.work(Load(crowd.sessions, 1, 0.0, warmup_s=0.0))
    tenth, chunks = max(1, len(rss) // 10), sum(count for count, _ in results)
    first, last = statistics.median(rss[:tenth]), statistics.median(rss[-tenth:])
    return Endured(
        rss_growth=last / first,
        bytes_per_sample=(first - before) / statistics.median(in_hands[:tenth]),
        bytes_per_held=(first - before) / held[0],
        bytes_per_session=(before - alone) / crowd.sessions,
        cpu_us_per_chunk=used_s / chunks * 1e6,
        chunks_per_s=chunks / crowd.window_s,
        rss_mib=last / 2**20,
        least_in_flight=min(in_hands),
    )


def wait_until_all(in_flight, crowd: Stream, crew: Crew) -> None:
    """All but what is being replaced."""
    longest_s = crowd.joining_s + FILL_S
    deadline = time.monotonic() + longest_s
    while (held := sum(count.value for count in in_flight)) < 0.95 * crowd.in_flight:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"only {held} of {crowd.in_flight} samples are in flight after {longest_s:g} s")
        crew.watch(0.1)


def look(address: str, rss: int, in_hands: int) -> int:
    """Say where samples are; how many the ledger holds, but those of the batch that the learner has."""
    member = Member(Door(address), "monitor", "looks")
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
