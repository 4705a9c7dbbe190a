"""A client of the broker in any role, written from docs/protocol.md alone; it shares no code with the package."""

import struct
import time
import zlib

import msgpack
import zmq

HEADER = struct.Struct("<2sBBIQQ")
ROW = struct.Struct("<QdIIIIIIBBB5x")
FINISH_REASONS = ["", "stop", "length"]
DTYPES = {"i4": "i", "f4": "f", "u1": "B"}
PATIENCE_S = 60.0


def pack(tag, *fields, arrays=(), session=0, sequence=0):
    """Frames of a message; arrays are (dtype, values)."""
    raw = [struct.pack(f"<{len(values)}{DTYPES[dtype]}", *values) for dtype, values in arrays]
    heads = [[dtype, len(values), zlib.crc32(data)] for (dtype, values), data in zip(arrays, raw, strict=True)]
    header = HEADER.pack(b"AP", 16, 0, len(heads), session, sequence)
    return [header, msgpack.packb([[tag, *fields], heads]), *([b"".join(raw)] if any(raw) else [])]


def row(lease_id, start, ids, logprobs, version, finish_reason=""):
    """(row, payload) of a report with new tokens that the policy sampled."""
    payload = struct.pack(f"<{len(ids)}i{len(logprobs)}f", *ids, *logprobs)
    head = (lease_id, time.time(), start, len(ids), *version, len(payload), zlib.crc32(payload))
    return ROW.pack(*head, 0, FINISH_REASONS.index(finish_reason), 0), payload


def tables(rows):
    """Arrays of a report with the given (row, payload) pairs."""
    return [("u1", b"".join(row for row, _ in rows)), ("u1", b"".join(payload for _, payload in rows))] if rows else []


class Received:
    def __init__(self, frames, connection):
        header, body, *frames = frames
        magic, protocol, _, count, self.session, self.sequence = HEADER.unpack(header)
        (self.tag, *self.fields), heads = msgpack.unpackb(body)
        assert (magic, protocol, count) == (b"AP", 16, len(heads))
        self.connection = connection
        self.arrays = []
        raw, at = b"".join(frames), 0
        for dtype, length, checksum in heads:
            form = struct.Struct(f"<{length}{DTYPES[dtype]}")
            data, at = raw[at : at + form.size], at + form.size
            assert zlib.crc32(data) == checksum
            self.arrays.append(list(form.unpack(data)))
        assert at == len(raw)


class Client:
    """A peer with one session over two connections. Received messages collect in `inbox`."""

    def __init__(self, address, role, name):
        self.role, self.name, self.uid = role, name, f"{name}-uid"
        self.session = self.sequence = 0
        self.inbox = []
        self.next_heartbeat = float("inf")
        self.context = zmq.Context()
        self.context.linger = 2000  # a test that fails leaves messages that nobody takes
        self.sockets = {}
        for connection in ("data", "control"):
            self.sockets[connection] = self.context.socket(zmq.DEALER)
            self.sockets[connection].connect(address)

    def hello(self, lease_ids=()):
        sequence = self.send("Hello", self.role, self.name, self.uid, list(lease_ids))
        welcome = self.take("Welcome")
        assert welcome.connection == "data" and welcome.sequence == sequence
        assert welcome.session == welcome.fields[0]
        self.session = welcome.session
        self.send("Bind", over="control")
        self.next_heartbeat = 0.0
        return welcome.fields

    def send(self, tag, *fields, arrays=(), over="data"):
        self.sequence += 1
        self.sockets[over].send_multipart(
            pack(tag, *fields, arrays=arrays, session=self.session, sequence=self.sequence)
        )
        return self.sequence

    def receive(self, timeout_ms=0):
        if time.monotonic() > self.next_heartbeat:
            self.next_heartbeat = time.monotonic() + 1.0
            self.send("Heartbeat", [], 0, over="control")
        poller = zmq.Poller()
        for socket in self.sockets.values():
            poller.register(socket, zmq.POLLIN)
        poller.poll(timeout_ms)
        for connection, socket in self.sockets.items():
            while socket.poll(0):
                self.inbox.append(Received(socket.recv_multipart(), connection))

    def find(self, *tags):
        return [received for received in self.inbox if received.tag in tags]

    def wait_for(self, *tags):
        """Wait for a message with one of these tags; returns the oldest such one in the inbox."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.find(*tags):
            assert time.monotonic() < deadline, f"no {tags} for {self.name}, but {[r.tag for r in self.inbox]}"
            self.receive(50)
        return self.find(*tags)[0]

    def take(self, *tags):
        """Like `wait_for`, but removes the message from the inbox."""
        self.inbox.remove(found := self.wait_for(*tags))
        return found

    def ask(self, answer, tag, *fields, arrays=()):
        """Send a request and wait for its answer, which echoes the sequence number."""
        sequence = self.send(tag, *fields, arrays=arrays)
        received = self.take(answer, "Refused")
        assert received.tag == answer and received.sequence == sequence, received.fields
        return received

    def close(self):
        """Say goodbye, so that a broker that ends need not wait for this peer, and close the connections."""
        self.send("Goodbye")
        for socket in self.sockets.values():
            socket.close(linger=2000)
        self.context.term()


class Lease:
    """A grant with all response tokens of its sample, which are counted as docs/protocol.md describes."""

    def __init__(self, task, grant, prompt, response):
        group, self.evaluation, self.label, self.reward, self.temperature, self.top_p, self.top_k, self.min_p, *_ = task
        self.id, _, index, self.scoring, self.budget, self.seed, self.finish_reason, *rest = grant
        self.hand_over, self.group_scored, *self.turn = rest
        self.sample = (group, index)
        self.prompt, self.ids = prompt, list(response)
        self.logprobs = []
        """Log-probabilities of the tokens that this client has sampled."""


def reward_of(lease):
    return float(lease.id % 2)


class Worker(Client):
    def __init__(self, address, name="raw-worker"):
        super().__init__(address, "worker", name)
        self.leases, self.unseen = {}, []
        self.watermark = 0
        self.acknowledged = {"generated": 0, "evaluation": 0}
        """Number of acknowledged tokens: `generated` of training, `evaluation` of evaluation."""

    def next_lease(self):
        if not self.unseen:
            message = self.take("Grants")
            assert message.connection == "data" and message.sequence == 0
            tasks, grants = message.fields
            prompts, responses = message.arrays[: len(tasks)], message.arrays[len(tasks) :]
            for grant, response in zip(grants, responses, strict=True):
                self.unseen.append(Lease(tasks[grant[1]], grant, prompts[grant[1]], response))
            assert len({task[0] for task in tasks}) == len(tasks), "a prompt comes once, however many samples it has"
        lease = self.unseen.pop(0)
        self.leases[lease.id] = lease
        return lease

    @property
    def has_leases(self):
        """Whether grants have arrived that `next_lease` has not returned."""
        return bool(self.unseen or self.find("Grants"))

    def next_training_lease(self, version):
        """The next training lease. Completes evaluation samples before it, gives back leases under an abort."""
        while (lease := self.next_lease()).evaluation or lease.id <= self.watermark:
            self.end(lease, version)
        return lease

    def end(self, lease, version):
        """End a lease as after an abort: complete an evaluation sample, give back a training sample."""
        if lease.evaluation:
            self.complete(lease, 2, version)
        else:
            self.give_back(lease, "abort")

    def complete(self, lease, count, version):
        self.generate(lease, count, version, "stop")
        self.report(["Scored", lease.id, [reward_of(lease)], [{}]])
        self.done(lease)

    def generate(self, lease, count, version, finish_reason=""):
        """Sample `count` tokens, stream them, and wait for the acknowledgement."""
        start = len(lease.ids)
        ids = [2 + (lease.id + position) % 40 for position in range(start, start + count)]
        logprobs = [-(1 + position % 16) / 8 for position in range(start, start + count)]
        self.send_chunk(lease, start, ids, logprobs, version, finish_reason)
        lease.ids += ids
        lease.logprobs += logprobs
        assert self.take("Answers", "Refused").fields == [[[lease.id, len(lease.ids)]], [], [], []]
        self.acknowledged["evaluation" if lease.evaluation else "generated"] += count

    def send_chunk(self, lease, start, ids, logprobs, version, finish_reason=""):
        return self.report(rows=[row(lease.id, start, ids, logprobs, version, finish_reason)])

    def report(self, *closings, rows=()):
        return self.send("Report", list(closings), arrays=tables(rows))

    def give_back(self, lease, cause):
        self.report(["GiveBack", lease.id, len(lease.ids), cause, ""])
        self.done(lease)

    def done(self, lease):
        assert self.take("Answers", "Refused").fields == [[], [lease.id], [], []]
        self.leases.pop(lease.id, None)
