"""Invalid messages for the fuzzer: damaged, mistyped, misplaced, repeated or absurd ones, drawn at random.

Each attack is (route, frames, peer, answer): the peer's connection it comes over, its frames, the owner of its key
(None without CURVE), and how the broker must answer: "refused", or "anything" if the broker may also accept or ignore
it.
"""

import msgpack
import numpy as np

from april import wire
from april.weights.channel import ChannelAlive, ChannelFailed, ChannelJoin
from april.wire import limits
from april.wire.message import Version
from april.wire.rows import pack_rows, padded
from april.wire.security.allow_list import KeyOwner
from tests.support.broker_conversation import chunk, observation

EXTREMES = [0, 1, -1, 2, 2**31, -(2**31), 2**32, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1]
JUNK = [
    None, True, -1, 2**64 - 1, 1.5, float("nan"), float("inf"), "", "x" * 300, b"\x00", [], [[[]]], {}, {"a": 1}, "\n",
]  # fmt: skip
TOKENS = [np.ones(3, "i4"), np.full(3, -1.0, "f4")]
ABSURD = [0.0, -1e308, float("nan"), float("inf")]
CLOSINGS = [
    lambda c, lease_id: wire.Scored(lease_id, [c.choice(ABSURD)] * c.choice([1, 2]), [{}] * c.choice([1, 2])),
    lambda c, lease_id: wire.GiveBack(lease_id, c.choice([0, 2**53]), "abort", "e" * c.choice([0, 9999])),
]
ROWS = [
    lambda c, lease_id: chunk(lease_id, c.choice([0, 1, 7, 2**53]), Version(0, 0), TOKENS, c.choice(["", "stop"])),
    lambda c, lease_id: observation(lease_id, c.choice([0, 1, 7, 2**53]), TOKENS[0], b"state"),
]
"""Functions (random generator, lease id) -> (row, payload) of a report."""
ONLY_FOR = {
    "worker": [
        wire.WorkerCapacity(Version(0, 0), 4),
        wire.ActivitySpan("generate", 0.0, 1.0),
        wire.WeightFolderRefused(Version(0, 0), "torn"),
        wire.Report([wire.Scored(1, [1.0], [{}])]),
        wire.Report([wire.GiveBack(1, 0, "leave")]),
    ],
    "scorer": [wire.HolderCapacity(4)],
    "agents": [wire.Report([wire.Closed(1)]), wire.HolderRequest(0, 0, 256)],
    "learner": [
        wire.StartLearner(0, ""),
        wire.Submit(0, [wire.Submission(1, "")]),
        wire.Fetch(0),
        wire.Consumed(0, {"loss": 1.0}),
        wire.Durable(0, 0),
        wire.BestRequest(),
        wire.WeightsWritten(wire.WeightFolder(Version(0, 0), "0" * 64)),
    ],
    "node": [wire.Rendezvous("here:1"), wire.Rendezvous(start=1)],
    "monitor": [wire.StatusRequest(), wire.StopRun("enough"), wire.Drain(True), wire.Requeue([1])],
    "broker": [
        wire.Welcome(1, "", 1, 0, 0, [], 1.0, ""),
        wire.Answers([], [1]),
        wire.Accepted(),
        wire.Batch(0, 0, 0, []),
        wire.Stop(""),
        wire.AgentSessionList([]),
        wire.SessionTurns(),
        wire.WeightFolders([]),
    ],
    "lanes": [ChannelJoin("u", "n", "cpu", None), ChannelAlive("l"), ChannelFailed("l", "e")],
}
LARGEST_LEASE = 2**64 - 1
NOT_REPEATED = (wire.Hello, wire.Goodbye, wire.StartLearner, wire.StopRun)
"""Message types that the repetition attack leaves out: sent a second time, they have a new meaning."""


def encode(message, arrays=(), session=0, sequence=1):
    return [bytes(frame) for frame in wire.encode(message, list(arrays), session, sequence)]


def report(row, payload):
    """Arrays of a report with a single row: the packed row, and its padded payload."""
    return [np.frombuffer(pack_rows([row]), "u1"), np.frombuffer(payload.ljust(padded(len(payload)), b"\0"), "u1")]


def decodes(frames):
    try:
        wire.decode(frames)
    except wire.WireError:
        return False
    return True


class Attacker:
    def __init__(self, arena, chance):
        self.arena = arena
        self.chance = chance
        self.kinds = [
            self.noise, self.damaged, self.cut, self.flipped_array, self.mistyped, self.strange_session,
            self.other_connection, self.other_role, self.foreign_lease, self.absurd_learner, self.absurd_worker,
            self.absurd_tokens, self.absurd_scores, self.repeated, self.greeting, self.revoked, self.other_key,
            self.too_large,
        ]  # fmt: skip
        if arena.agents:
            self.kinds.append(self.absurd_agents)

    def attack(self):
        return self.chance.choice(self.kinds)()

    # --- material ---------------------------------------------------------------------------------------------

    def peer(self):
        return self.chance.choice(self.arena.everyone)

    def route(self):
        return self.peer().name.encode() + self.chance.choice([b"/data", b"/control"])

    def bytes(self, most):
        return self.chance.randbytes(self.chance.randrange(most))

    def earlier(self):
        """(route, frames) of a valid message that a peer has sent before."""
        route, frames = self.chance.choice(self.arena.sent)
        return route, list(frames)

    def anything(self):
        return self.chance.choice([message for messages in ONLY_FOR.values() for message in messages])

    # --- attacks ----------------------------------------------------------------------------------------------

    def noise(self):
        frames = [self.bytes(100) for _ in range(self.chance.randrange(7))]
        return self.route(), frames, None, "refused"

    def damaged(self):
        """A message whose header has another protocol, or wrong facts about its arrays."""
        route, frames = self.earlier()
        at, value = self.chance.choice([(0, 0), (1, 7), (2, 99), (4, frames[0][4] + 1), (5, 200)])
        frames[0] = frames[0][:at] + bytes([value]) + frames[0][at + 1 :]
        return route, frames, None, "refused"

    def cut(self):
        route, frames = self.earlier()
        at = self.chance.randrange(len(frames))
        if self.chance.random() < 0.5 and frames[at]:
            frames[at] = frames[at][: self.chance.randrange(len(frames[at]))]
        else:
            frames.insert(at, self.bytes(40)) if self.chance.random() < 0.5 else frames.pop(at)
        return (route, frames, None, "refused") if not decodes(frames) else self.noise()

    def flipped_array(self):
        route, (*head, arrays) = self.chance.choice(self.arena.sent_arrays)
        place = self.chance.randrange(len(arrays))
        flipped = arrays[place] ^ (1 << self.chance.randrange(8))
        frames = [*head, arrays[:place] + bytes([flipped]) + arrays[place + 1 :]]
        return route, frames, None, "refused"

    def mistyped(self):
        """A message with a field of another type, one field too few or one too many."""
        route, frames = self.earlier()
        body = msgpack.unpackb(frames[1], strict_map_key=False)
        part = self.chance.choice([body, body[0], *(field for field in body[0] if field and isinstance(field, list))])
        change = self.chance.randrange(3)
        if change == 0:
            part[self.chance.randrange(len(part))] = self.chance.choice(JUNK)
        elif change == 1:
            part.pop()
        else:
            part.append(self.chance.choice(JUNK))
        frames[1] = msgpack.packb(body)
        return (route, frames, None, "refused") if not decodes(frames) else self.noise()

    def strange_session(self):
        session = self.chance.choice([abs(value) % 2**64 for value in EXTREMES])
        return self.route(), encode(self.anything(), session=session), None, "refused"

    def other_connection(self):
        """A message with the id of a live session, sent over another connection than the session's."""
        return b"stranger/data", encode(self.anything(), session=self.peer().session), None, "refused"

    def other_role(self):
        peer = self.peer()
        role = self.chance.choice([role for role in ONLY_FOR if role != peer.role])
        message = self.chance.choice(ONLY_FOR[role])
        if isinstance(message, wire.HolderCapacity) and peer.role == "agents":
            return self.noise()
        return peer.name.encode() + b"/data", encode(message, session=peer.session), None, "refused"

    def foreign_lease(self):
        """A report on a lease that is not the sender's: another holder's, nobody's, or one that ended long ago."""
        holder, other = self.chance.sample(self.arena.holders, 2)
        tokens = {*EXTREMES[:-1], *self.arena.leases_of(other), *self.arena.ended} - {*self.arena.leases_of(holder)}
        lease_id, make = self.chance.choice(sorted(tokens)), self.chance.choice([*CLOSINGS, *ROWS])
        if make in ROWS:
            message, arrays = wire.Report(), report(*make(self.chance, lease_id & LARGEST_LEASE))
        else:
            message, arrays = wire.Report([make(self.chance, lease_id)]), []
        frames = encode(message, arrays, holder.session)
        return holder.name.encode() + b"/data", frames, None, "refused"

    def absurd_learner(self):
        learner, beyond = self.arena.learner, self.arena.ledger.steps.next + self.chance.choice([1, 2, 2**31, 2**50])
        message = self.chance.choice(
            [
                wire.Fetch(beyond),
                wire.Submit(beyond, [wire.Submission(beyond, "", "no_verifier")]),
                wire.Consumed(beyond, {"loss": float("nan")}),
                wire.Consumed(self.arena.ledger.steps.consumed, {f"m{number}": 0.0 for number in range(1000)}),
                wire.Durable(beyond, 0),
                wire.StartLearner(beyond, "tcp://elsewhere"),
                wire.WeightsWritten(wire.WeightFolder(Version(0, beyond), "0" * 64)),
                wire.WeightsWritten(wire.WeightFolder(Version(2**50, 0), "0" * 64)),
            ]
        )
        return learner.name.encode() + b"/data", encode(message, session=learner.session), None, "refused"

    def absurd_worker(self):
        """A message of a worker about itself with impossible values, such as weights that nobody has published."""
        worker = self.chance.choice(self.arena.workers)
        message = self.chance.choice(
            [
                wire.WorkerCapacity(Version(0, 2**53), 4),
                wire.WorkerCapacity(Version(2**53, 0), 4),
                wire.Heartbeat([7] * 9000),
            ]
        )
        return worker.name.encode() + b"/data", encode(message, (), worker.session), None, "refused"

    def absurd_tokens(self):
        """A worker's report on its own lease with an invalid chunk or observation."""
        worker = self.chance.choice(self.arena.workers)
        lease_id, (ids, logprobs) = self.arena.a_lease_of(worker), TOKENS
        of_a_chunk = [
            [ids],
            [ids, logprobs[:2]],
            [-ids, logprobs],
            [2**20 * ids, logprobs],
            [ids, np.nan * logprobs],
            [logprobs, ids],
            [ids[:0], logprobs[:0]],
            [ids, logprobs, ids],
            [ids, logprobs, ids, 2 * ids],
            [ids, logprobs, ids, ids[:2]],
            [ids, logprobs, ids[:2], ids[:2]],
            [ids, logprobs, 0 * ids, ids[:0]],
            [ids, logprobs, np.array([-1, 3, 1], "i4"), ids],
            [ids, logprobs, np.array([2, 1, 1], "i4"), np.array([1, 2**20, 1, 1], "i4")],
        ]
        row, payload = self.chance.choice(
            [
                chunk(lease_id, 0, Version(0, 0), self.chance.choice(of_a_chunk)),
                observation(lease_id, 0, self.chance.choice([-ids, 2**20 * ids, ids[:0]])),
                observation(lease_id, 0, ids, bytes(limits.MAX_STATE_BYTES + 1)),
            ]
        )
        good, said = chunk(lease_id, 0, Version(0, 0), TOKENS)
        arrays = self.chance.choice(
            [
                report(row, payload),
                report(good._replace(checksum=good.checksum ^ 1), said),
                report(good._replace(kind=9), said),
                report(good._replace(finish=9), said),
                report(good._replace(ends_lease=1), said),
                report(good._replace(size=good.size + 4), said),
                report(good._replace(tokens=2**31), said),
                report(good._replace(time=float("nan")), said),
                report(good, said)[:1],
                [*report(good, said)[:1], np.ones(6, "i4")],
                [report(good, said)[0][:47], report(good, said)[1]],
            ]
        )
        return worker.name.encode() + b"/data", encode(wire.Report(), arrays, worker.session), None, "refused"

    def absurd_agents(self):
        """An agents process's report that its own session does not allow, or a session's closing on a lease that is no
        session."""
        agents, worker, (ids, logprobs) = self.arena.agents, self.chance.choice(self.arena.workers), TOKENS
        mine, another = self.arena.a_lease_of(agents), self.arena.a_lease_of(worker)
        requests = [b"", b"state", msgpack.packb([b"k", 0, []]), msgpack.packb([b"k" * 65, 4, []]),
                    msgpack.packb([b"k", 4, [1] * 17]), msgpack.packb([b"k", "many", []])]  # fmt: skip
        sent = self.chance.choice(
            [
                (agents, wire.Report(), report(*observation(mine, 0, ids, self.chance.choice(requests)))),
                (agents, wire.Report(), report(*chunk(mine, 0, Version(0, 0), [ids, logprobs]))),
                (agents, wire.Report([wire.Scored(mine, [float("nan")], [{}])]), []),
                (worker, wire.Report([wire.Closed(another)]), []),
                (worker, wire.Report([wire.GiveBack(another, 0, "agent_failed", "tired")]), []),
                (agents, wire.WorkerCapacity(Version(0, 0), 4), []),
            ]
        )
        peer, message, arrays = sent
        return peer.name.encode() + b"/data", encode(message, arrays, peer.session), None, "refused"

    def absurd_scores(self):
        """A score on the sender's own lease with invalid rewards or details."""
        holder, bad = self.chance.choice(self.arena.holders), self.chance.choice([float("nan"), float("-inf")])
        lease_id = self.arena.a_lease_of(holder)
        many = {f"d{number}": 0.0 for number in range(limits.MAX_REWARD_DETAILS + 1)}
        message = self.chance.choice(
            [
                wire.Scored(lease_id, [bad], [{}]),
                wire.Scored(lease_id, [1.0], [many]),
                wire.Scored(lease_id, [1.0], [{"right": bad}]),
                wire.Scored(lease_id, [1.0, bad], [{}, {}]),
                wire.Scored(lease_id, [1.0, 1.0], [{}, many]),
                wire.Scored(lease_id, [1.0, 1.0], [{}]),
                wire.Scored(lease_id, [1.0] * 7, [{}] * 7),
                wire.Scored(lease_id, [], []),
            ]
        )
        return holder.name.encode() + b"/data", encode(wire.Report([message]), (), holder.session), None, "refused"

    def repeated(self):
        """An earlier valid message, sent again unchanged."""
        route, frames = self.earlier()
        repeated = not isinstance(wire.decode(frames).message, NOT_REPEATED)
        return (route, frames, None, "anything") if repeated else self.noise()

    def greeting(self):
        """A hello of an unknown peer that claims leases which it does not hold."""
        name = f"stranger-{self.chance.getrandbits(40)}"
        leases = [abs(self.chance.choice(EXTREMES[:-1])) for _ in range(self.chance.randrange(20))]
        role = self.chance.choice(["worker", "scorer", "monitor", "king", "", "x" * 5000])
        hello = wire.Hello(role, name, name + self.chance.choice(["", "\n", "é" * 200]), leases, 2**53)
        return name.encode() + b"/data", encode(hello), None, "anything"

    def revoked(self):
        route, frames = self.earlier()
        return route, frames, KeyOwner("k" * 40, "", ""), "refused"

    def other_key(self):
        """A valid message that comes with the key of another peer."""
        route, frames = self.earlier()
        message = wire.decode(frames).message
        role = "monitor" if isinstance(message, wire.Hello) and message.role != "monitor" else "worker"
        return route, frames, KeyOwner("k" * 40, role, "thief"), "refused"

    def too_large(self):
        worker = self.chance.choice(self.arena.workers)
        frames = self.chance.choice(
            [
                encode(wire.StopRun("x" * 600_000), session=worker.session),
                encode(wire.Heartbeat(), [np.ones(1, "i4")] * 5, worker.session),
                [bytes(24)] * self.chance.choice([5, 1000]),
            ]
        )
        return worker.name.encode() + b"/control", frames, None, "refused"
