"""A broker without sockets, and fake peers that exchange protocol frames with it."""

import itertools
from types import SimpleNamespace

import msgspec
import numpy as np

from april import wire
from april.agents.link import rows_with_payloads
from april.broker.images import ImageStore
from april.broker.journal.files import JournalError
from april.broker.journal.journal import Journal
from april.broker.prompts import open_prompts
from april.broker.service import Service
from april.broker.snapshots import DONE, NOT_READ, NOT_WRITTEN, POLL_S, make_snapshot
from april.broker.views.metrics import MetricsSnapshot, series
from april.broker.views.status import read_status
from april.observe.report.run_folder import read_records
from april.wire.message import Version
from april.wire.rows import chunk_row, observation_row, pack_rows, padded
from april.workers.scoring import leases_of
from tests.support.open_brokers import OPEN

LEARNERS = itertools.count()


class Conversation:
    """A service whose clock the test sets; messages sent to a peer collect in its `inbox`."""

    def __init__(self, config):
        self.config = config
        self.now = 1_000_000.0
        self.peers = {}
        self.start()
        OPEN.append(self)

    def start(self):
        broker = self.config.broker
        self.journal = Journal(
            self.config.run_dir / "journal", broker.journal_file_mb << 20, broker.journal_file_records
        )
        prompts = open_prompts(self.config, ImageStore(self.config.run_dir))
        self.service = Service(self.config, prompts, self.journal, self.now)
        self.service.snapshots.start = HelperHere
        self.deliver()

    def restart_broker(self):
        """Kill and restart the broker; peers have to say hello again."""
        self.close()
        self.peers = {}
        self.start()

    def close(self):
        self.journal.close()
        self.service.note.close()
        self.service.prompts.close()

    @property
    def ledger(self):
        return self.service.ledger

    def deliver(self):
        mark = self.service.recorder.sync_mark()
        self.journal.sync()
        self.service.synced(mark)
        for message in (*self.service.peers.take_immediate(), *self.service.peers.take_outgoing()):
            frames = [bytes(f) for f in wire.encode(message.message, message.arrays, message.session, message.sequence)]
            if peer := self.peers.get(message.route.split(b"/")[0]):
                peer.inbox.append(wire.decode(frames))

    def take_snapshot(self):
        """End the journal's file if it is full, and wait until the snapshot is on disk or has failed."""
        self.service.end_file()
        self.tick(POLL_S)
        while self.service.snapshots.busy:
            self.tick(POLL_S)

    def status(self):
        """The answer to `april status`."""
        return msgspec.to_builtins(read_status(self.service.context, self.now))

    def metrics(self):
        """The values of all metrics at /metrics, by name."""
        return series(MetricsSnapshot(read_status(self.service.context, self.now, bottleneck=False)))

    def tick(self, seconds=0.0):
        self.now += seconds
        self.service.tick(self.now)
        self.deliver()
        while self.service.has_more:
            self.service.tick(self.now)
            self.deliver()


class HelperHere:
    """Stand-in for the snapshot process that does its work in this process."""

    def __init__(self, folder, position, rules):
        self.steps, self.ended = make_snapshot(folder, position, rules), None

    def dead_files(self):
        return self.next()

    def confirm_closed(self):
        self.next()

    def next(self):
        try:
            return next(self.steps)
        except StopIteration:
            self.ended = DONE
        except JournalError:
            self.ended = NOT_READ
        except OSError:
            self.ended = NOT_WRITTEN

    def status(self):
        return self.ended

    def close(self):
        self.steps.close()


class Peer:
    def __init__(self, conversation, role, name, uid=None):
        self.conversation = conversation
        self.role, self.name, self.uid = role, name, uid or name + "-uid"
        self.inbox = []
        self.session = 0
        conversation.peers[name.encode()] = self

    def hello(self, leases=()):
        welcome = self.arrive(leases)
        self.say(wire.Bind(), connection=b"control")
        return welcome

    def arrive(self, leases=()):
        """Say hello on the data connection; messages before the welcome are dropped."""
        self.say(wire.Hello(self.role, self.name, self.uid, list(leases)))
        while not isinstance((welcome := self.inbox.pop(0).message), wire.Welcome):
            pass
        self.session = welcome.session
        return welcome

    def say(self, message, arrays=(), connection=b"data"):
        frames = [bytes(frame) for frame in wire.encode(message, list(arrays), self.session, 1)]
        route = self.name.encode() + b"/" + connection
        self.conversation.service.handle(route, frames, self.conversation.now)
        self.conversation.tick()

    def take(self, kind):
        """Messages of a kind that have arrived since the last call, oldest first."""
        found = [received for received in self.inbox if isinstance(received.message, kind)]
        self.inbox = [received for received in self.inbox if not isinstance(received.message, kind)]
        return found


class Holder(Peer):
    def grants(self):
        """Grants that have arrived since the last call, each with the fields of its task and with its arrays: prompt,
        then response tokens."""
        return [grant for received in self.take(wire.Grants) for grant in granted(received)]

    def report(self, rows=(), closings=()):
        """Send a report with rows, each given as (row, payload), and closings."""
        arrays = []
        if rows:
            payload = b"".join(payload.ljust(padded(len(payload)), b"\0") for _, payload in rows)
            table = pack_rows([row for row, _ in rows])
            arrays = [np.frombuffer(table, "u1"), np.frombuffer(payload, "u1")]
        self.say(wire.Report(list(closings)), arrays)

    def score(self, grant, reward=1.0, **details):
        self.report(closings=[wire.Scored(grant.lease_id, [reward], [details])])

    def give_back(self, grant, length, cause, error=""):
        self.report(closings=[wire.GiveBack(grant.lease_id, length, cause, error)])

    def answers(self, kind):
        """Entries of one kind (`acks`, `done`, `nacks` or `rejects`) in the answers since the last call; the other
        kinds are dropped."""
        return [entry for received in self.take(wire.Answers) for entry in getattr(received.message, kind)]


class FakeWorker(Holder):
    def __init__(self, conversation, name="w0", uid=None):
        super().__init__(conversation, "worker", name, uid)

    def join(self, step=0, capacity=10, leases=()):
        welcome = self.hello(leases)
        self.hold(step, capacity)
        return welcome

    def hold(self, step, capacity=10):
        self.version = Version(0, step)
        self.say(wire.WorkerCapacity(self.version, capacity))

    def chunk(self, grant, start, count, finish_reason="", version=None):
        self.report([self.new_tokens(grant, start, count, finish_reason, version)])

    def new_tokens(self, grant, start, count, finish_reason="", version=None):
        """(row, payload) of a report with `count` new tokens from position `start` on."""
        arrays = chunk_arrays(start, count)
        cut = self.conversation.config.sampling.is_cut and not grant.evaluation
        arrays = [*arrays, *support_arrays(arrays[0])] if cut else arrays
        return chunk(grant.lease_id, start, version or self.version, arrays, finish_reason)

    def abort_all(self):
        """Hand back every lease of the run as aborted."""
        leases = self.conversation.ledger.leases
        for lease_id, lease in list(leases.items()):
            self.report(closings=[wire.GiveBack(lease_id, lease.sample.length, "abort")])

    def complete(self, grant, count=4, reward=1.0, **details):
        self.chunk(grant, 0, count, "stop")
        self.score(grant, reward, **details)


class FakeScorer(Holder):
    def __init__(self, conversation, name="s0", uid=None):
        super().__init__(conversation, "scorer", name, uid)

    def join(self, capacity=10, leases=()):
        welcome = self.hello(leases)
        self.say(wire.HolderCapacity(capacity))
        return welcome


class FakeAgents(Holder):
    def __init__(self, conversation, name="a0", uid=None):
        super().__init__(conversation, "agents", name, uid)
        self.sessions, self.heard = {}, {}
        """By lease id: the session as the broker sent it, and the (row, payload) pairs received in it."""
        self.received_bytes = 0

    def join(self, capacity=4, leases=()):
        welcome = self.hello(leases)
        self.say(wire.HolderCapacity(capacity))
        return welcome

    def listen(self):
        """Take the sessions and turns that have arrived."""
        for received in self.take(wire.AgentSessionList):
            self.received_bytes += received.array_bytes
            for told in received.message.sessions:
                self.sessions[told.lease_id] = told
                self.heard[told.lease_id] = list(rows_with_payloads(*(packed.data for packed in received.packed)))
        for received in self.take(wire.SessionTurns):
            self.received_bytes += received.array_bytes
            for row, payload in rows_with_payloads(*(packed.data for packed in received.packed)):
                self.heard[row.lease_id].append((row, payload))
        return list(self.sessions.values())

    def say_to_policy(self, lease_id, start, count, max_tokens=8, key=b"k"):
        request = msgspec.msgpack.encode(wire.TurnRequest(key, max_tokens, [5]))
        payload = np.arange(count, dtype="<i4").tobytes() + request
        self.report([(observation_row(lease_id, start, count, "", payload), payload)])


class FakeLearner(Peer):
    def __init__(self, conversation, name=None):
        super().__init__(conversation, "learner", name or f"learner-{next(LEARNERS)}")
        self.received_bytes = 0

    def join(self, step=0):
        self.hello()
        self.say(wire.StartLearner(step, "tcp://weights"))
        return self.take(wire.LearnerAdmitted)[-1].message

    def fetch(self, step, samples=False):
        """The batch of a step with its arrays as lists; None if it is not complete yet."""
        self.say(wire.Fetch(step, samples, held_out=samples))
        batches = self.take(wire.Batch)
        return (batches[-1].message, [array.tolist() for array in batches[-1].arrays]) if batches else None

    def fetch_parts(self, step):
        """All messages of a batch, read while the broker sends them in parts."""
        self.say(wire.Fetch(step))
        parts = []
        for _ in range(100):
            for received in self.take(wire.Batch):
                self.received_bytes += received.array_bytes
                parts.append(received)
            self.say(wire.Heartbeat([], 0, self.received_bytes), connection=b"control")
        return parts

    def consume(self, step, discarded="", loss=0.5, **figures):
        self.say(wire.Consumed(step, {"loss": loss, **figures}, discarded))
        assert self.take(wire.Accepted)

    def durable(self, step):
        """Report that the checkpoint of a step is on disk, and the only one kept."""
        self.say(wire.Durable(step, step))
        assert self.take(wire.Accepted)


def chunk_arrays(start, count):
    """(ids, logprobs) of tokens `start` to `start + count` of some response."""
    return np.arange(start, start + count, dtype="i4") % 40 + 2, np.full(count, -0.5, "f4")


def support_arrays(ids):
    """(counts, support ids): the first token has a support of one id, the next of two, and so on."""
    rows = [[0] * index + [token] for index, token in enumerate(ids.tolist())]
    return np.array([len(row) for row in rows], "i4"), np.array([token for row in rows for token in row], "i4")


def chunk(lease_id, start, version, arrays, finish_reason=""):
    """(row, payload) of a report with a chunk of tokens."""
    payload = b"".join(array.tobytes() for array in arrays)
    return chunk_row(lease_id, start, len(arrays[0]), version, finish_reason, payload, 0.0), payload


def one_row(lease_id, start, count):
    """(message, arrays) of a report with new tokens of one sample under the first weights."""
    row, payload = chunk(lease_id, start, Version(0, 0), chunk_arrays(start, count))
    return wire.Report(), [np.frombuffer(pack_rows([row]), "u1"), np.frombuffer(payload, "u1")]


def observation(lease_id, start, ids, state=b"", finish_reason="", failed=False):
    payload = ids.tobytes() + state
    return observation_row(lease_id, start, len(ids), finish_reason, payload, failed, 0.0), payload


def granted(received):
    return [
        SimpleNamespace(**fields(lease.task), **fields(lease.grant), arrays=lease.tokens)
        for lease in leases_of(received)
    ]


def fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def joined(peer, *arguments, **options):
    """The peer, once it has joined."""
    peer.join(*arguments, **options)
    return peer


def training(grants):
    return [grant for grant in grants if not grant.evaluation]


def finish_evaluation(worker):
    grants = worker.grants()
    for grant in grants:
        if grant.evaluation:
            worker.complete(grant)
    return training(grants) + training(worker.grants())


def make_batch(worker):
    """Complete groups until a batch is delivered; returns the grants that were aborted."""
    grants, ledger = finish_evaluation(worker), worker.conversation.ledger
    before = ledger.steps.next
    while ledger.steps.next == before:
        grant = grants.pop(0)
        worker.complete(grant)
        grants += training(worker.grants())
    return grants


def train(talk, worker, learner, step, **figures):
    """Generate and train a batch; `figures`: the learner's metrics besides its loss."""
    make_batch(worker)
    worker.abort_all()
    learner.fetch(step)
    learner.consume(step, **figures)
    worker.hold(step + 1)


def metrics_lines(talk):
    return read_records(talk.config.run_dir / "metrics.jsonl")


AGENTS = ["--evaluation.prompts", "1", "--agent.command", '["true"]', "--sampling.max_response_tokens", "32"]


def journal_file(talk):
    return max(talk.journal.folder.glob("*.msgpack"))


def damage(talk, record, offset):
    """Flip a bit in the journal on disk, in the middle of a record's payload."""
    with journal_file(talk).open("r+b") as file:
        file.seek(record + offset)
        byte = file.read(1)[0]
        file.seek(record + offset)
        file.write(bytes([byte ^ 0x10]))
