"""Handles messages of agents processes: leases agent sessions to them, takes observations, and forwards turns.

An agent reports observations, each of which opens a turn. Any worker with room generates the turn, whose tokens are
forwarded once they are on disk. Between turns only the session's own lease is held.
"""

import logging
from collections.abc import Iterator
from itertools import accumulate
from operator import itemgetter

import msgspec
import numpy as np
from msgspec.structs import replace
from zlib_ng.zlib_ng import crc32

from april import wire
from april.broker.context import BrokerContext
from april.broker.handlers.images import take_image
from april.broker.handlers.lease_holders import NOT_CURRENT, LeaseHolderHandler
from april.broker.handlers.reports import RowValidator, turn_requests
from april.broker.ledger.admission import Verdict
from april.broker.ledger.chunk_refs import ChunkRef
from april.broker.ledger.samples import UNFINISHED, GroupState, Lease, Sample, SampleState
from april.broker.peers import Peer
from april.wire.message import Version
from april.wire.rows import Buffer, ReportRow, chunk_row, observation_row, pack_rows, padded, select_rows

log = logging.getLogger(__name__)

STOP = "stop"


class AgentHandler(LeaseHolderHandler):
    def __init__(self, context: BrokerContext):
        super().__init__(context)
        self.validator = RowValidator(context.config)

    # --- connecting -----------------------------------------------------------------------------------------

    def after_welcome(self, peer: Peer) -> None:
        """Send an agents process all its sessions again after it has reconnected: messages to its old connections may
        be lost."""
        for lease in self.leases_of(peer.uid):
            self._send_session(peer, lease)

    def on_holder_capacity(self, peer: Peer, received: wire.Received, now: float) -> None:
        peer.capacity = min(received.message.capacity, self.config.security.max_leases)
        peer.address = received.message.address

    def on_holder_request(self, peer: Peer, received: wire.Received, now: float) -> None:
        request = received.message
        group = self.ledger.groups.get(request.group)
        is_open = group and group.state is GroupState.OPEN and request.index < len(group.samples)
        sample = group.samples[request.index] if group and is_open else None
        answer = wire.Holder(request.group, request.index, request.lease_id, "over")
        if sample is not None and sample.state in UNFINISHED:
            answer = replace(answer, state="moved")
            if sample.agent_lease == request.lease_id:
                holder = self.peers.holder(self.ledger.leases[request.lease_id].worker)
                answer = replace(answer, state="held", address=holder.address if holder else "")
        self.peers.send(peer, answer, sequence=received.sequence)

    # --- observations ---------------------------------------------------------------------------------------

    def take_rows(self, peer: Peer, packed: list[wire.PackedArray], now: float) -> None:
        """Take observations that agents report, each of which begins a turn of the policy; each row is accepted or
        refused by itself. `packed`: the report's rows and their payloads."""
        table, payload = self.validator.read(packed, now)
        lease_ids = table["lease_id"].tolist()
        leases = [self.ledger.leases.find(lease_id) for lease_id in lease_ids]
        requests = turn_requests(table, payload)
        faults = self.validator.faults(table, payload, leases, requests)
        images = {index: request.images for index, request in enumerate(requests) if request and request.images}
        for index, names in images.items():
            if not all(name in self.context.payloads.images for name in names):
                faults.setdefault(index, "it names an image that the broker does not have")
        verdicts = self.ledger.add_chunks(
            table.view("u1").data, payload.data, peer.uid, faults, payload.checksum, images
        )
        tokens = 0
        for index, (lease, verdict) in enumerate(zip(leases, verdicts, strict=True)):
            lease_id = lease_ids[index]
            if lease is None or verdict is Verdict.FENCED:
                self.reject(peer, lease_id, NOT_CURRENT)
            elif verdict in (Verdict.OK, Verdict.DUPLICATE):
                self.peers.acknowledge(peer, lease_id, fork_length(lease, lease_id))
                tokens += int(table["tokens"][index]) if verdict is Verdict.OK else 0
            elif verdict is Verdict.GAP:
                self.peers.nack(peer, lease_id, fork_length(lease, lease_id))
            elif index in faults:
                self.reject(peer, lease_id, f"{wire.BAD_ROW}{faults[index]}")
            elif verdict is not Verdict.DROPPED:
                reason = "turn refused: it is not the agent's turn there, or the fork has no room for so much"
                self.ledger.end_lease(lease.id, "agent_failed", reason, now)
                self.reject(peer, lease_id, reason)
        self.recorder.add_observations(verdicts.count(Verdict.OK), tokens, 0)

    # --- turns and sessions ---------------------------------------------------------------------------------

    def forward_rows(self, table: np.ndarray, payload: Buffer, leases: list[Lease | None]) -> None:
        """Forward the turns of the policy that workers report to the agents that asked for them, after the journal's
        next sync.

        `leases`: the lease of each row; None where the row was refused. `table`, `payload`: rows and their payloads, as
        in `wire.rows`.
        """
        agent_leases = [lease and self.ledger.leases.get(lease.sample.session_sample.agent_lease) for lease in leases]
        holders = {agent.worker for agent in agent_leases if agent}
        ids = [
            agent.id + lease.sample.fork_number if agent and lease else 0
            for agent, lease in zip(agent_leases, leases, strict=True)
        ]
        for uid in holders:
            peer = self.peers.holder(uid)
            if peer is None or not peer.data_route:
                continue  # after its next hello it gets its sessions in full
            taken = [agent is not None and agent.worker == uid for agent in agent_leases]
            own = table.copy()
            own["lease_id"] = ids
            rows, payloads = select_rows(own.tobytes(), payload, taken)
            self.peers.send(peer, wire.SessionTurns(), [packed(rows), packed(payloads)])

    def hand_out(self, now: float) -> None:
        """Lease sessions to the agents processes that have room, the least loaded first; none while the broker is
        drained."""
        if self.ledger.rounds.draining or not self.ledger.rules.agents:
            return
        if self.context.schedule.finished(self.ledger):
            self._end_training()
        able = [peer for peer in self.peers.with_role("agents") if self._has_room(peer)]
        while able:
            peer = min(able, key=lambda each: self._load(each) / each.capacity)
            sample = self._choose()
            if sample is None:
                return
            if self.config.agent.replay == "discard" and sample.session_started:
                self._discard(sample)
                continue
            lease = self.ledger.lease_agent(sample, peer.uid, now + self.config.broker.lease_s)
            self._send_session(peer, lease)
            able = [peer for peer in able if self._has_room(peer)]

    def _discard(self, sample: Sample) -> None:
        """End a session whose agent process is lost, since running the agent again would repeat its side effects."""
        ids = {"group": sample.group.id, "sample": sample.index}
        log.warning("the agent of a session is lost, and agent.replay = 'discard' has it not run again", extra=ids)
        self.ledger.lose_session(sample)

    def _end_training(self) -> None:
        """End agents processes' leases on training sessions after the last batch.

        The turns of these sessions would never be generated, and agents that wait for one start no evaluation. The
        sessions stay open in the ledger for a run that is resumed.
        """
        for peer in self.peers.with_role("agents"):
            for lease in self.leases_of(peer.uid):
                if not lease.sample.group.evaluation:
                    self.ledger.end_lease(lease.id, "leave")
                    self.cancel(peer, lease.id)

    def _choose(self) -> Sample | None:
        """The sample to lease to an agents process next: an evaluation sample while evaluation has less than its share
        of all sessions (`evaluation.share`), or else a training sample, or else a further evaluation sample. After the
        last batch only evaluation samples. None if none waits."""
        evaluated = self.ledger.leases.evaluating_agents
        room = sum(peer.capacity for peer in self.peers.with_role("agents"))
        queue, schedule = self.ledger.queue, self.context.schedule
        if schedule.finished(self.ledger):
            return queue.take_for_agent(True)
        share_left = evaluated < self.config.evaluation.share * room
        return (
            (queue.take_for_agent(True) if share_left else None)
            or schedule.next_for_agent(self.ledger)
            or queue.take_for_agent(True)
        )

    def _load(self, peer: Peer) -> int:
        return len(self.ledger.leases.held.get(peer.uid, ()))

    def _has_room(self, peer: Peer) -> bool:
        if not peer.control_route or self._load(peer) >= peer.capacity:
            return False
        return self.peers.has_credit(peer, self.context.credit_bytes)

    def _send_session(self, peer: Peer, lease: Lease) -> None:
        sample, group, payloads = lease.sample, lease.sample.group, self.context.payloads
        row = payloads.row_of(group.evaluation, group.epoch, group.row)
        sampling = self.config.sampling
        drawn = self.context.prompts.held_out[group.epoch].settings if group.evaluation else sampling
        session = wire.AgentSession(
            lease_id=lease.id,
            group=group.id,
            index=sample.index,
            evaluation=group.evaluation,
            prompt=msgspec.json.encode(row.prompt).decode(),
            label=row.label,
            max_tokens=self.context.prompts.budget_of(group.evaluation, group.epoch, group.row),
            temperature=drawn.temperature,
        )
        rows: list[ReportRow] = []
        bodies: list[bytes] = []
        for history_row, body in self._history(lease):
            rows.append(history_row)
            bodies.append(bytes(body).ljust(padded(len(body)), b"\0"))
        self.peers.send(peer, wire.AgentSessionList([session]), [packed(pack_rows(rows)), packed(b"".join(bodies))])

    def _history(self, lease: Lease) -> list[tuple[ReportRow, memoryview]]:
        """All rows of a session in the order in which they were reported, each with its payload."""
        rows = [row for fork in lease.sample.with_forks for row in self._fork_rows(fork, lease.id + fork.fork_number)]
        return [(row, body) for _, row, body in sorted(rows, key=itemgetter(0))]

    def _fork_rows(self, fork: Sample, lease_id: int) -> Iterator[tuple[ChunkRef, ReportRow, memoryview]]:
        """Yield the rows of a fork that follow the tokens shared with its parent; the last row of a complete turn has a
        finish reason. `lease_id`: id of the fork, which is the session's lease id plus the fork's number."""
        ends = list(accumulate(ref.tokens for ref in fork.chunk_refs))
        refs = [ref for ref, end in zip(fork.chunk_refs, ends, strict=True) if end > fork.shared_tokens]
        bodies, start = self.context.payloads.journal.read_payloads(iter(refs)), fork.shared_tokens
        for (ref, body), following in zip(bodies, [*refs, None][1:], strict=True):
            if ref.observed:
                parent = fork.parent_fork if start == fork.shared_tokens else 0
                row = observation_row(lease_id, start, ref.tokens, "", body, parent=parent)
            else:
                version = Version(ref.incarnation, ref.step)
                turn_over = following.observed if following else fork.state is SampleState.ACTING
                row = chunk_row(lease_id, start, ref.tokens, version, STOP if turn_over else "", body)
            yield ref, row, body
            start += ref.tokens

    MESSAGES = LeaseHolderHandler.MESSAGES | {
        wire.HolderCapacity: on_holder_capacity,
        wire.HolderRequest: on_holder_request,
        wire.KeepImage: take_image,
    }


def fork_length(agent_lease: Lease, lease_id: int) -> int:
    """Response length, in tokens, of the fork with id `lease_id`, which is the session's lease id plus the fork's
    number; 0 for an unknown fork."""
    fork = agent_lease.sample.find_fork(lease_id - agent_lease.id)
    return fork.length if fork else 0


def packed(data: bytes | bytearray) -> wire.PackedArray:
    return wire.PackedArray("u1", crc32(data), bytes(data))
