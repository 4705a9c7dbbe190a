"""Our side of the stream: workers that report the new tokens of all their sequences together, once a tick.

Sockets, grants, scores and batches are real; tokens are the same in every row, so that making them costs little. Many
sessions share a process, each with a data and a control connection of its own. A session has one report on the way;
saturated, it sends the next as soon as that is answered.
"""

import math
import random
import select
import time
from collections.abc import Iterator
from ctypes import c_long
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

import numpy as np
import zmq
from zlib_ng.zlib_ng import crc32

from april import wire
from april.wire.codec import Buffer
from april.wire.message import Version
from april.wire.rows import TABLE
from april.wire.sockets import base
from april.wire.sockets.control import HEARTBEAT_S

from .april_side import consume, ping, serving, write_run
from .load import BenchmarkError, Crew, Load, Window

GROUP_SIZE, BATCH_GROUPS = 8, 64
PROMPT_TOKENS = 256
SPARE = 256
"""Rows of samples that are granted before the ends of their predecessors are acknowledged."""
BURSTS, BURST = 30, 20
"""Heartbeats over each new connection: bursts, and heartbeats of a burst; each is answered."""
RENEW_S = 15.0
POLL_MS = 2
HELLO_MS = 30_000


@dataclass(frozen=True)
class Stream:
    """Responses have 1 to `2 * mean_chunks - 1` chunks, each number as likely."""

    sessions: int
    sequences: int
    """Sequences of each session at a time."""
    tokens: int = 60
    """Tokens of a chunk."""
    mean_chunks: int = 34
    chunks_per_s: float = math.inf
    """Chunks a second of all sessions together."""
    processes: int = 2
    window_s: float = 10.0
    warmup_s: float = 8.0
    joining_s: float = 0.0
    """Time over which sessions start one after the other (seconds)."""

    def __str__(self) -> str:
        return f"{self.sessions}x{self.sequences}"

    @property
    def in_flight(self) -> int:
        return self.sessions * self.sequences

    @property
    def longest(self) -> int:
        """Tokens of a response."""
        return (2 * self.mean_chunks - 1) * self.tokens

    @property
    def tick_s(self) -> float:
        """Between two reports of a session."""
        return self.in_flight / self.chunks_per_s


@dataclass(frozen=True)
class Streamed:
    chunks_per_s: float
    """Chunks acknowledged in the window."""
    cpu_us: float
    """All processor time of the server for each chunk (µs)."""
    submit_ms: np.ndarray
    """float [reports]: time from sending a report to its answer."""
    round_trips_ms: np.ndarray
    """float [n]: round trips of another peer's heartbeats, if they were asked for."""


def schedule(stream: Stream, batch_groups: int = BATCH_GROUPS) -> str:
    """TOML of `continuous` that keeps every sequence in flight: the bound has room for the groups that finish beside a
    longest response, and for a batch on its way."""
    batches = math.ceil(2 * stream.in_flight / (batch_groups * GROUP_SIZE))
    return f"""
[schedule]
kind = "continuous"
in_flight = {stream.in_flight}
max_staleness = {2 * batches + 2}
rollout_batch_size = {batch_groups}
n_samples_per_prompt = {GROUP_SIZE}
max_steps = 1000000

[broker]
session_timeout_s = 60.0
"""


def measure(stream: Stream, folder: Path, pings: bool = False) -> Streamed:
    """Against a new broker in an empty folder."""
    config = write_run(folder, schedule(stream), stream.longest, prompt_tokens=PROMPT_TOKENS)
    with serving(config) as broker, Crew() as crew:
        address, frontier, granting = broker.address(), RawValue(c_long, 0), RawValue("b", 0)
        crew.add(consume, address, frontier)
        if pings:
            crew.add(ping, address)
        for number in range(stream.processes):
            crew.add(run_sessions, address, number, stream, frontier, granting, RawValue(c_long, 0))
        crew.all_ready()
        granting.value = 1
        load = Load(stream.sessions, stream.sequences, stream.window_s, stream.warmup_s)
        _, *others = crew.work(load, broker.pid)
    round_trips_ms = others.pop(0) if pings else np.empty(0)
    chunks = sum(count for count, _ in others)
    return Streamed(
        chunks / stream.window_s,
        crew.server_s / chunks * 1e6,
        np.concatenate([times_ms for _, times_ms in others]),
        round_trips_ms,
    )


class Inboxes:
    """Hundreds of sockets of one process, polled at the cost of those that have messages; `zmq.Poller` asks the kernel
    for each socket each time. `look_at` is for after each send: descriptors tell of changes, which sending reads."""

    def __init__(self):
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, zmq.Socket] = {}
        self._unseen: set[zmq.Socket] = set()
        """Sockets that may have messages of which their descriptors do not tell again."""

    def add(self, socket: zmq.Socket) -> None:
        descriptor = socket.getsockopt(zmq.FD)
        self._by_descriptor[descriptor] = socket
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        self._unseen.add(socket)

    def look_at(self, socket: zmq.Socket) -> None:
        self._unseen.add(socket)

    def receive(self, timeout_ms: float) -> Iterator[tuple[zmq.Socket, list[zmq.Frame]]]:
        """All that has come, once there is something or the time has passed."""
        changed = self._epoll.poll(0.0 if self._unseen else timeout_ms / 1000)
        unseen, self._unseen = self._unseen, set()
        for socket in unseen.union(self._by_descriptor[descriptor] for descriptor, _ in changed):
            while base.has_message(socket):
                yield socket, base.receive(socket)

    def close(self) -> None:
        self._epoll.close()


@dataclass(slots=True, eq=False)
class Session:
    """Two connections, whose messages carry its number, and the samples in its hands."""

    data: zmq.Socket
    control: zmq.Socket
    inboxes: Inboxes
    capacity: int
    rows: np.ndarray
    """[capacity] of `TABLE`: what the next report says of each sample; lease id 0 where there is none"""
    chunks_left: np.ndarray
    """Chunks to come of each sample: int64 [capacity]."""
    number: int = 0
    held: int = -1
    next_beat: float = 0.0
    next_renewal: float = 0.0
    next_tick: float = 0.0
    joins_at: float = math.inf
    sent_at: float = 0.0
    """When the report under way was sent; 0 for none."""
    reported: int = 0
    """Rows of the report under way."""
    received_bytes: int = 0
    scoring: list[int] = field(default_factory=list)
    """Leases that want only a score."""
    row_of: dict[int, int] = field(default_factory=dict)
    """Row of each lease."""

    def send(self, message: wire.Message, arrays=()) -> None:
        self._send(self.data, wire.encode(message, arrays, self.number))

    def _send(self, socket: zmq.Socket, frames: list[Buffer]) -> None:
        base.send(socket, frames, wait=True)
        self.inboxes.look_at(socket)

    def beat(self, now: float) -> None:
        leases = list(self.row_of) if now >= self.next_renewal else []
        if leases:
            self.next_renewal = now + RENEW_S
        self.next_beat = now + HEARTBEAT_S
        beat = wire.Heartbeat(leases, 0, self.received_bytes)
        self._send(self.control, wire.encode(beat, (), self.number))

    def handle(self, received: wire.Received, stream: Stream, chance: random.Random) -> None:
        self.received_bytes += received.array_bytes
        match received.message:
            case wire.Grants(tasks=tasks, grants=grants):
                responses = received.packed[len(tasks) :]
                for grant, response in zip(grants, responses, strict=True):
                    self._accept(grant, len(response.data) // 4, stream, chance)
            case wire.Answers(done=done, nacks=resend, rejects=refused):
                if resend or refused:
                    raise BenchmarkError(f"the broker wants {resend} again and refuses {refused}")
                for lease_id in done:
                    if (row := self.row_of.pop(lease_id, None)) is not None:
                        self.rows["lease_id"][row] = 0
            case wire.Renewed() | wire.Evaluating() | wire.WeightsAddress() | wire.Abort():
                pass
            case unwanted:
                raise BenchmarkError(f"the broker answers a worker with {unwanted}")

    def _accept(self, grant: wire.Grant, length: int, stream: Stream, chance: random.Random) -> None:
        if grant.scoring:
            return self.scoring.append(grant.lease_id)
        row = int(np.flatnonzero(self.rows["lease_id"] == 0)[0])
        done = length // stream.tokens
        self.row_of[grant.lease_id] = row
        self.rows["lease_id"][row], self.rows["start"][row] = grant.lease_id, length
        self.chunks_left[row] = chance.randint(1, 2 * stream.mean_chunks - 1 - done)

    def report(self, payload: memoryview, tokens: int, now: float) -> None:
        """One row of each sample that still generates, and the scores of those that end with it."""
        going = np.flatnonzero((self.rows["lease_id"] > 0) & (self.chunks_left > 0))
        self.reported, self.sent_at = len(going), now
        self.rows["step"], self.rows["time"] = self.held, now
        self.chunks_left[going] -= 1
        self.rows["finish"] = self.chunks_left == 0
        table = self.rows[going]
        ended = table["lease_id"][table["finish"] > 0].tolist()
        closings = [wire.Scored(lease_id, [1.0], [{}]) for lease_id in (*ended, *self.scoring)]
        self.scoring = []
        arrays = [np.frombuffer(table.tobytes(), np.uint8), np.frombuffer(payload, np.uint8, len(going) * 8 * tokens)]
        most = wire.limits.MAX_REPORT_CLOSINGS
        self.send(wire.Report(closings[:most]), arrays if len(going) else [])
        for first in range(most, len(closings), most):
            self.send(wire.Report(closings[first : first + most]))
        self.rows["start"][going] += tokens


def run_sessions(
    ready, window: Window, address: str, number: int, stream: Stream, frontier, granting, in_flight, warmed=False
) -> tuple[int, np.ndarray]:
    """A process full of sessions; `granting` lets them take leases, `in_flight` says how many they hold; `warmed`:
    connections are as in a session that has lasted. Returns the
    chunks that were acknowledged in the window, and float [reports]: how long each report took, ms."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * stream.sessions + 16)
    chance, now = random.Random(number), time.monotonic()
    chunk = np.arange(stream.tokens, dtype="<i4").tobytes() + np.full(stream.tokens, -1.0, "<f4").tobytes()
    payload = memoryview(chunk * (stream.sequences + SPARE))
    inboxes = Inboxes()
    sessions = [
        open_session(context, inboxes, address, f"worker-{index}", stream, chunk)
        for index in range(number, stream.sessions, stream.processes)
    ]
    if warmed:
        warm_connections([session.data for session in sessions], sessions)
    for session in sessions:
        session.control.send_multipart(wire.encode(wire.Bind(), (), session.number))
    if warmed:
        warm_connections([session.control for session in sessions], sessions)
    owners = {socket: session for session in sessions for socket in (session.data, session.control)}
    for session in sessions:
        session.next_tick = now + chance.random() * min(stream.tick_s, 1e6)
    counted, times_ms, next_round = 0, [], 0.0
    ready()
    while not window.over():
        stirred = {}
        for socket, frames in inboxes.receive(POLL_MS):
            session = owners[socket]
            received = wire.decode(frames)
            session.handle(received, stream, chance)
            stirred[session.number] = session
            if session.sent_at and isinstance(received.message, wire.Answers):
                now = time.monotonic()
                if window.covers(now):
                    counted += session.reported
                    times_ms.append((now - session.sent_at) * 1000)
                session.sent_at = 0.0
        now = time.monotonic()
        due = stirred.values() if now < next_round else sessions
        next_round = now + POLL_MS / 1000 if now >= next_round else next_round
        for session in due:
            if now >= session.next_beat:
                session.beat(now)
            if granting.value and session.joins_at == math.inf:
                session.joins_at = now + chance.random() * stream.joining_s
            if now >= session.joins_at and session.held != frontier.value:
                session.held = frontier.value
                session.send(wire.WorkerCapacity(Version(0, session.held), session.capacity))
            if not session.sent_at and now >= session.next_tick and (session.row_of or session.scoring):
                session.report(payload, stream.tokens, now)
                session.next_tick = max(session.next_tick + stream.tick_s, now)
        in_flight.value = sum(len(session.row_of) for session in sessions)
    for session in sessions:
        session.send(wire.Goodbye())
    inboxes.close()
    context.destroy(linger=2000)
    return counted, np.array(times_ms)


def open_session(
    context: zmq.Context, inboxes: Inboxes, address: str, name: str, stream: Stream, payload: bytes
) -> Session:
    rows = np.zeros(stream.sequences + SPARE, TABLE)
    rows["tokens"], rows["size"], rows["checksum"] = stream.tokens, len(payload), crc32(payload)
    data, control = (connect(context, address) for _ in range(2))
    inboxes.add(data)
    inboxes.add(control)
    session = Session(data, control, inboxes, stream.sequences, rows, np.zeros(len(rows), np.int64))
    session.send(wire.Hello("worker", name, name))
    if not session.data.poll(HELLO_MS):
        raise BenchmarkError(f"the broker does not answer the hello of {name}")
    session.number = wire.decode(session.data.recv_multipart()).message.session
    return session


def warm_connections(connections: list[zmq.Socket], sessions: list[Session]) -> None:
    """Carry so many heartbeats and answers over each connection that libzmq's queues (two of 16 KiB a way, which become
    resident page by page with use) are what they are in a session that has lasted."""
    for _ in range(BURSTS):
        for socket, session in zip(connections, sessions, strict=True):
            for _ in range(BURST):
                socket.send_multipart(wire.encode(wire.Heartbeat([], 0, 0), (), session.number))
        for socket, session in zip(connections, sessions, strict=True):
            for _ in range(BURST):
                if not socket.poll(HELLO_MS):
                    raise BenchmarkError(f"the broker does not answer session {session.number}")
                socket.recv_multipart()


def connect(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    return socket
