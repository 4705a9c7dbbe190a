"""Many workers for a long time: what a thousand sessions and a hundred thousand samples cost the broker.

Each worker holds its share of the samples and streams small chunks of them in turn, the next of a sample once the
last is acknowledged; a finished sample is scored and replaced at once, a learner consumes every batch. All sockets
are real; many sessions share a process, each with its own data and control connection.
"""

import itertools
import math
import os
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray, RawValue
from pathlib import Path

import numpy as np
import zmq

from april import wire
from april.connections.broker import HEARTBEAT_S
from april.wire.version import Version

from .april_side import Door, consume, serving, write_run
from .load import BenchmarkError, Crew, Load, Window, cpu_s

GROUP_SIZE = 8
CHUNK_TOKENS = 64
MOST_CHUNKS = 4
"""responses have 1 to this many chunks, each as likely"""
BATCH_GROUPS = 256
MOST_UNACKNOWLEDGED = 256
"""chunks on the way from one process: what waits in the broker's sockets is none of its samples"""
RENEW_S = 15.0
POLL_MS = 5
RSS_EVERY_S = 1.0
BURSTS, BURST = 30, 20
"""of heartbeats over each new connection, each answered"""


@dataclass(frozen=True)
class Crowd:
    sessions: int
    samples: int
    chunks_per_s: int
    warmup_s: float
    """after all samples are in flight; every sample is replaced at least once"""
    window_s: float
    processes: int = 4


FULL = Crowd(sessions=1000, samples=100_000, chunks_per_s=2000, warmup_s=240, window_s=600)
QUICK = Crowd(sessions=100, samples=2_000, chunks_per_s=500, warmup_s=20, window_s=20)


@dataclass(frozen=True)
class Endured:
    rss_growth: float
    """resident memory in the last tenth of the window over that in its first tenth"""
    bytes_per_sample: float
    """resident memory after the warm-up, less that with only the sessions, for each sample in flight by then"""
    bytes_per_session: float
    """resident memory with only the sessions, whose connections have been used, less that without, for each"""
    cpu_us_per_chunk: float
    """all that the broker did in the window over the chunks in it"""
    chunks_per_s: float
    rss_mib: float
    least_in_flight: int
    """samples in workers' hands, at any look during the window"""


def schedule(crowd: Crowd) -> str:
    """TOML of `continuous` that keeps every sample in flight: the bound has room for twice the groups that finish
    beside a longest response, since the processes do not share the cores evenly, and the slowest has stragglers."""
    mean_chunks = (1 + MOST_CHUNKS) / 2
    batches = math.ceil(crowd.samples * MOST_CHUNKS / mean_chunks / (BATCH_GROUPS * GROUP_SIZE))
    return f"""
[schedule]
kind = "continuous"
in_flight = {crowd.samples}
max_staleness = {2 * batches}
rollout_batch_size = {BATCH_GROUPS}
n_samples_per_prompt = {GROUP_SIZE}
max_steps = 1000000

[broker]
session_timeout_s = 60.0
"""


def endure(crowd: Crowd, folder: Path) -> Endured:
    config = write_run(folder, schedule(crowd), response_tokens=MOST_CHUNKS * CHUNK_TOKENS)
    with serving(config) as broker, Crew() as crew:
        address, frontier = broker.address(), RawValue("l", 0)
        alone = rss_bytes(broker.pid)
        granting = RawValue("b", 0)
        in_flight = RawArray("l", crowd.processes)
        crew.add(consume, Door(address), frontier)
        for number in range(crowd.processes):
            crew.add(attend, address, number, crowd, frontier, granting, in_flight)
        crew.all_ready(within_s=600.0)
        before = rss_bytes(broker.pid)
        granting.value = 1
        wait_until_all(in_flight, crowd.samples, crew)
        crew.watch(crowd.warmup_s)
        started_s, rss, held = cpu_s(broker.pid), [], []
        crew.window.open(crowd.window_s)
        while not crew.window.over():
            rss.append(rss_bytes(broker.pid))
            held.append(sum(in_flight))
            crew.watch(RSS_EVERY_S)
        used_s = cpu_s(broker.pid) - started_s
        _, *chunks = crew.work(Load(crowd.sessions, 1, 0.0, warmup_s=0.0))
    tenth = max(1, len(rss) // 10)
    first, last = statistics.median(rss[:tenth]), statistics.median(rss[-tenth:])
    return Endured(
        rss_growth=last / first,
        bytes_per_sample=(first - before) / statistics.median(held[:tenth]),
        bytes_per_session=(before - alone) / crowd.sessions,
        cpu_us_per_chunk=used_s / sum(chunks) * 1e6,
        chunks_per_s=sum(chunks) / crowd.window_s,
        rss_mib=last / 2**20,
        least_in_flight=min(held),
    )


def wait_until_all(in_flight, wanted: int, crew: Crew) -> None:
    deadline = time.monotonic() + 300
    while sum(in_flight) < wanted:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"only {sum(in_flight)} of {wanted} samples are in flight after 300 s")
        crew.watch(0.1)


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True, eq=False)
class Stream:
    """A sample in a worker's hands."""

    worker: "Worker"
    lease_id: int
    sent: int
    left: int
    """chunks to come"""


@dataclass(slots=True, eq=False)
class Worker:
    """One session: two connections, whose messages carry its number."""

    data: zmq.Socket
    control: zmq.Socket
    session: int = 0
    held: int = -1
    next_beat: float = 0.0
    next_renewal: float = 0.0
    live: dict[int, Stream] = field(default_factory=dict)
    unacknowledged: set[int] = field(default_factory=set)
    received_bytes: int = 0

    def send(self, message: wire.Message, arrays=()) -> None:
        self.data.send_multipart(wire.encode(message, arrays, self.session))

    def beat(self, now: float) -> None:
        leases = list(self.live) if now >= self.next_renewal else []
        if leases:
            self.next_renewal = now + RENEW_S
        self.next_beat = now + HEARTBEAT_S
        beat = wire.Heartbeat(leases, 0, self.received_bytes)
        self.control.send_multipart(wire.encode(beat, (), self.session))


def attend(ready, window: Window, address: str, number: int, crowd: Crowd, frontier, granting, in_flight) -> int:
    """A process full of workers. Returns the chunks that it sent in the window."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * crowd.sessions)
    sessions, pace = crowd.sessions // crowd.processes, crowd.chunks_per_s / crowd.processes
    workers = [say_hello(context, address, f"worker-{number}-{place}") for place in range(sessions)]
    break_in(workers)
    owners = {socket: worker for worker in workers for socket in (worker.data, worker.control)}
    poller = zmq.Poller()
    for socket in owners:
        poller.register(socket, zmq.POLLIN)
    chance = random.Random(number)
    ids, logprobs = np.arange(CHUNK_TOKENS, dtype=np.int32), np.full(CHUNK_TOKENS, -1.0, np.float32)
    streams: deque[Stream] = deque()
    beats = itertools.cycle(workers)
    due, counted, then = 0.0, 0, time.monotonic()
    ready()
    while not window.over():
        for socket, _ in poller.poll(POLL_MS):
            worker = owners[socket]
            while socket.poll(0):
                received = wire.decode(socket.recv_multipart())
                worker.received_bytes += received.array_bytes
                take_in(worker, received, streams, chance)
        now = time.monotonic()
        for worker in itertools.islice(beats, sessions):
            if now >= worker.next_beat:
                worker.beat(now)
            if granting.value and worker.held != frontier.value:
                worker.held = frontier.value
                worker.send(wire.Holding(Version(0, worker.held), crowd.samples // crowd.sessions))
        in_flight[number] = sum(len(worker.live) for worker in workers)
        due, then = min(due + (now - then) * pace, pace), now
        on_the_way = sum(len(worker.unacknowledged) for worker in workers)
        while due >= 1 and streams and on_the_way < MOST_UNACKNOWLEDGED:
            send_chunk(streams.popleft(), ids, logprobs)
            due, on_the_way, counted = due - 1, on_the_way + 1, counted + window.covers(now)
    for worker in workers:
        worker.send(wire.Goodbye())
    context.destroy(linger=2000)
    return counted


def say_hello(context: zmq.Context, address: str, name: str) -> Worker:
    worker = Worker(*(connect(context, address) for _ in range(2)))
    worker.send(wire.Hello("worker", name, name))
    if not worker.data.poll(30_000):
        raise BenchmarkError(f"the broker does not answer the hello of {name}")
    worker.session = wire.decode(worker.data.recv_multipart()).message.session
    return worker


def break_in(workers: list[Worker]) -> None:
    """Carry so many messages over each connection, both ways, that libzmq's queues (two of 16 KiB a way, which become
    resident page by page with use) are what they are in a session that has lasted."""
    exchange_beats([(worker.data, worker.session) for worker in workers])
    for worker in workers:
        worker.control.send_multipart(wire.encode(wire.Bind(), (), worker.session))
    exchange_beats([(worker.control, worker.session) for worker in workers])


def exchange_beats(connections: list[tuple[zmq.Socket, int]]) -> None:
    """Heartbeats of the sessions over these connections, and their answers."""
    for _ in range(BURSTS):
        for socket, session in connections:
            for _ in range(BURST):
                socket.send_multipart(wire.encode(wire.Heartbeat([], 0, 0), (), session))
        for socket, session in connections:
            for _ in range(BURST):
                if not socket.poll(30_000):
                    raise BenchmarkError(f"the broker does not answer session {session}")
                socket.recv_multipart()


def connect(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    return socket


def take_in(worker: Worker, received: wire.Received, streams: deque[Stream], chance: random.Random) -> None:
    match received.message:
        case wire.Grant(lease_id=lease_id, scoring=True):
            worker.live[lease_id] = Stream(worker, lease_id, sum(map(len, received.arrays[1:])), 0)
            worker.send(wire.Scored(lease_id, 1.0))
        case wire.Grant(lease_id=lease_id):
            sent = sum(map(len, received.arrays[1:]))
            chunks = chance.randint(1, MOST_CHUNKS - sent // CHUNK_TOKENS)
            stream = worker.live[lease_id] = Stream(worker, lease_id, sent, chunks)
            streams.append(stream)
        case wire.Acknowledged(lengths=lengths, done=done):
            worker.unacknowledged.difference_update(lease_id for lease_id, _ in lengths)
            for lease_id in done:
                del worker.live[lease_id]
            streams += [
                worker.live[lease_id]
                for lease_id, _ in lengths
                if lease_id in worker.live and worker.live[lease_id].left
            ]
        case wire.Renewed() | wire.WeightsAt() | wire.Abort():
            pass
        case unwanted:
            raise BenchmarkError(f"the broker answers a worker with {unwanted}")


def send_chunk(stream: Stream, ids: np.ndarray, logprobs: np.ndarray) -> None:
    stream.left -= 1
    worker, finish_reason = stream.worker, "" if stream.left else "stop"
    chunk = wire.Chunk(stream.lease_id, stream.sent, Version(0, worker.held), finish_reason)
    worker.send(chunk, [ids, logprobs])
    worker.unacknowledged.add(stream.lease_id)
    stream.sent += CHUNK_TOKENS
    if not stream.left:
        worker.send(wire.Scored(stream.lease_id, 1.0))
