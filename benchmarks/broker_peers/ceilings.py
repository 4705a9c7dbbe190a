"""What no broker of this form outruns: its sockets without any work, and its disk without any messages."""

import math
import os
import time
from collections import deque
from pathlib import Path

import numpy as np
import zmq

from april import wire
from april.broker.desks.learner import PART_BYTES
from april.wire import rows
from april.wire.version import Version

from .april_side import BATCH_GROUPS, GROUP_SIZE
from .load import PROMPT_TOKENS, RECORD_BYTES, RECORD_TOKENS, Crew, Load, Window, record, steady_rate

DRAIN_MESSAGES = 256
POLL_MS = 20
LINGER_MS = 1000
BACKLOG_BATCHES = 3
"""records ahead of the consumer, in batches, from which on nothing is granted"""
PART_GROUPS = math.ceil(PART_BYTES / (GROUP_SIZE * RECORD_BYTES))
BATCH_RECORDS = BATCH_GROUPS * GROUP_SIZE
TOKEN = 1 << 32

HOLDING, REPORT, CONSUMED, FETCH = (bytes([kind]) * wire.HEADER.size for kind in range(4))
"""headers that tell the kinds of messages apart without decoding them"""


def disk_per_s(load: Load, folder: Path, batch_bytes: int) -> float:
    """Records/s of appending `batch_bytes` and `fdatasync`, again and again."""
    batch = os.urandom(batch_bytes)
    file = os.open(folder / "appended", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    syncs, started = 0, time.monotonic()
    while time.monotonic() < started + load.window_s:
        os.write(file, batch)
        os.fdatasync(file)
        syncs += 1
    elapsed_s = time.monotonic() - started
    os.close(file)
    return syncs * batch_bytes / RECORD_BYTES / elapsed_s


def sockets_per_s(load: Load, folder: Path) -> float:
    """Records/s over a bare ROUTER and DEALERs: the messages of a record, encoded once and never looked at."""
    with Crew() as crew:
        crew.add(route, folder / "address", load)
        crew.all_ready()
        address = (folder / "address").read_text()
        crew.add(consume, address)
        for number in range(load.producers):
            crew.add(produce, address, number)
        _, acknowledged, *_ = crew.work(load)
    return steady_rate(acknowledged)


def route(ready, window: Window, address_file: Path, load: Load) -> None:
    """The broker's loop: drain, answer."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.bind("tcp://127.0.0.1:*")
    address_file.write_text(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    acknowledgements, grant, accepted, part = broker_messages()
    consumer, finished, delivered = b"", 0, 0
    free_slots: deque[bytes] = deque()
    ready()
    while not window.over():
        outgoing: list[tuple[bytes, list]] = []
        drained = 0 if socket.poll(POLL_MS) else DRAIN_MESSAGES
        while drained < DRAIN_MESSAGES and socket.poll(0):
            drained += 1
            peer, kind, *_ = socket.recv_multipart()
            match kind:
                case _ if kind == HOLDING:
                    free_slots += [peer] * load.in_flight
                case _ if kind == REPORT:
                    finished += 1
                    outgoing += [(peer, frames) for frames in acknowledgements]
                    free_slots.append(peer)
                case _ if kind == CONSUMED:
                    outgoing.append((peer, accepted))
                case _ if kind == FETCH:
                    consumer = peer
        if consumer and finished >= delivered + BATCH_RECORDS:
            outgoing += [(consumer, part)] * (BATCH_GROUPS // PART_GROUPS)
            consumer, delivered = b"", delivered + BATCH_RECORDS
        if finished < delivered + BACKLOG_BATCHES * BATCH_RECORDS:
            outgoing += [(peer, grant) for peer in free_slots]
            free_slots.clear()
        for peer, frames in outgoing:
            socket.send_multipart([peer, *frames], copy=False)
    socket.close()
    context.term()


def broker_messages() -> tuple[list[list], list, list, list]:
    """Frames of: the acknowledgements of a record, a grant, the answer to Consumed or Durable, a part of a batch."""
    prompt = np.zeros(PROMPT_TOKENS, np.int32)
    done = [wire.encode(wire.Answers([(TOKEN, RECORD_TOKENS)], [TOKEN]))]
    task = wire.Task(1, False, "0", "final_answer", 1.0, 1.0, 0, 0.0)
    grant = wire.Grant(TOKEN, 0, 1, False, RECORD_TOKENS, 1 << 62, "", False, [], 0, 0, b"", [])
    sample = wire.SampleHead(1, RECORD_TOKENS, 1.0, "stop", [(0, RECORD_TOKENS, Version(0, 1))])
    head = wire.GroupHead(1, PROMPT_TOKENS, [sample] * GROUP_SIZE)
    ids, logprobs = record(0)
    arrays = [prompt, *[ids, logprobs] * GROUP_SIZE]
    part = wire.encode(wire.Batch(1, 0, BATCH_GROUPS, [head] * PART_GROUPS), arrays * PART_GROUPS)
    return done, wire.encode(wire.Grants([task], [grant]), [prompt, prompt[:0]]), wire.encode(wire.Accepted()), part


def connect(address: str) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(address)
    return socket


def received(socket: zmq.Socket) -> list[list[bytes]]:
    messages = []
    if socket.poll(POLL_MS):
        while socket.poll(0):
            messages.append(socket.recv_multipart())
    return messages


def produce(ready, window: Window, address: str, number: int) -> None:
    socket = connect(address)
    payload = b"".join(map(np.ndarray.tobytes, record(number)))
    row = rows.pack_rows([rows.chunk_row(TOKEN, 0, RECORD_TOKENS, Version(0, 1), "stop", payload)])
    arrays = [np.frombuffer(part, np.uint8) for part in (row, payload)]
    reported = [REPORT, *wire.encode(wire.Report([wire.Scored(TOKEN, [1.0], [{}])]), arrays)[1:]]
    socket.send_multipart([HOLDING, b""])
    ready()
    while not window.over():
        for frames in received(socket):
            if len(frames) == 3:
                socket.send_multipart(reported, copy=False)


def consume(ready, window: Window, address: str) -> list[tuple[float, int]]:
    socket = connect(address)
    body = wire.encode(wire.Consumed(1, {}))[1]
    socket.send_multipart([FETCH, body])
    acknowledged: list[tuple[float, int]] = []
    groups = 0
    ready()
    while not window.over():
        for frames in received(socket):
            if len(frames) == 2:
                continue
            groups += PART_GROUPS
            if groups == BATCH_GROUPS:
                groups, now = 0, time.monotonic()
                if window.covers(now):
                    acknowledged.append((now, BATCH_RECORDS))
                for kind in (CONSUMED, CONSUMED, FETCH):
                    socket.send_multipart([kind, body])
    return acknowledged
