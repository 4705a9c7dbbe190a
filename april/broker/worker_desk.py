"""The broker's side of the conversation with workers: leases out, chunks and scores in, aborts and losses."""

import heapq
import logging
import math
from typing import TYPE_CHECKING

import numpy as np

from april import limits, wire
from april.broker.events import ChunkAccepted, GroupOpened
from april.broker.ledger import Verdict
from april.broker.prompts import sample_seed
from april.broker.samples import Lease, Sample
from april.broker.sessions import Session

if TYPE_CHECKING:
    from april.broker.service import Service

log = logging.getLogger(__name__)


class WorkerDesk:
    def __init__(self, service: "Service"):
        self.service = service
        self.config = service.config
        self.ledger = service.ledger
        self.sessions = service.sessions
        self.recorder = service.recorder

    # --- coming and going -----------------------------------------------------------------------------------

    def hello(self, session: Session, hello: wire.Hello, now: float) -> list[int]:
        """Take in a worker; returns those of its leases that are lost. A namesake of another process is dead."""
        for other in self.sessions.workers():
            if other is not session and other.uid == hello.uid:
                self.sessions.close(other)
            elif other is not session and other.name == hello.name:
                self.sessions.send_control(other, wire.Stop(f"another worker has taken the name {hello.name}"))
                self.lose(other, "its successor has arrived", now)
        held = {token for token in hello.leases if self._holds(hello.uid, token)}
        self.ledger.renew(list(held), now + self.config.broker.lease_s)
        for lease in self.leases_of(hello.uid):
            if lease.token not in held:
                self.ledger.end_lease(lease.token, "lost", "its worker came back without it")
        self.recorder.lane(session.name, "joined", now, now)
        return [token for token in hello.leases if token not in held]

    def lose(self, session: Session, why: str, now: float) -> None:
        """A worker is gone: all that it held waits for another."""
        leases = self.leases_of(session.uid)
        log.warning("worker %s is lost (%s); %d samples wait for another", session.name, why, len(leases))
        for lease in leases:
            self.ledger.end_lease(lease.token, "lost", f"worker {session.name} was lost: {why}")
        self.recorder.lane(session.name, "lost", now, now)
        self.sessions.close(session)

    def goodbye(self, session: Session, now: float) -> None:
        for lease in self.leases_of(session.uid):
            self.ledger.end_lease(lease.token, "leave")
        self.sessions.close(session)

    def leases_of(self, uid: str) -> list[Lease]:
        return [lease for lease in self.ledger.leases.values() if lease.worker == uid]

    def _holds(self, uid: str, token: int) -> bool:
        lease = self.ledger.leases.get(token)
        return lease is not None and lease.worker == uid

    # --- what workers report --------------------------------------------------------------------------------

    def on_Heartbeat(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if len(message.leases) > self.config.security.max_leases:
            raise wire.WireError("more leases than a worker may hold")
        self.sessions.tallies[session.uid].emitted = message.emitted_tokens
        mine = [token for token in message.leases if self._holds(session.uid, token)]
        self.ledger.renew(mine, now + self.config.broker.lease_s)
        lost = [token for token in message.leases if token not in set(mine)]
        self.sessions.send_control(session, wire.Renewed(lost))

    def on_Holding(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if not self.ledger.was_published(message.version):
            raise wire.WireError("nobody can hold a version that was never published")
        if not 0 <= message.loaded_in_s < math.inf:
            raise wire.WireError("loading takes a finite time")
        session.version = message.version
        session.capacity = min(message.capacity, self.config.security.max_leases)
        if session.capacity < message.capacity:
            self.service.audit.say("worker %s gets room for %d leases, no more", session.name, session.capacity)
        if message.loaded_in_s:
            self.recorder.lane(session.name, "weights", now - message.loaded_in_s, now)

    def on_Lane(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if not (math.isfinite(message.start) and math.isfinite(message.end)):
            raise wire.WireError("a span has finite ends")
        self.recorder.lane(session.name, message.kind, message.start, message.end)

    def on_Chunk(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if len(received.arrays) != 2 or [array.dtype.str for array in received.arrays] != ["<i4", "<f4"]:
            raise wire.WireError("a chunk carries ids int32 and logprobs float32")
        ids, logprobs = received.arrays
        if not len(ids) or ids.shape != logprobs.shape or ids.min() < 0 or not np.isfinite(logprobs).all():
            raise wire.WireError("a chunk has at least one token, ids from 0, and a finite logprob for each")
        if len(ids) > limits.CHUNK_TOKENS:
            raise wire.WireError(f"a chunk has at most {limits.CHUNK_TOKENS} tokens")
        if not self._holds(session.uid, message.token):
            return self._refuse(session, received, "the lease is not current", len(ids))
        lease = self.ledger.leases[message.token]
        verdict = self.ledger.add_chunk(
            message.token, message.start, len(ids), message.version, message.finish_reason,
            ids.tobytes(), logprobs.tobytes(),
        )  # fmt: skip
        if verdict is Verdict.OK:
            self.sessions.tallies[session.uid].acknowledged += len(ids)
            session.acknowledged(now, len(ids))
            if not lease.sample.group.evaluation:
                self.recorder.tokens(len(ids))
        elif verdict is Verdict.GAP:
            return self.sessions.send(session, wire.ResendFrom(message.token, lease.sample.length))
        elif verdict is not Verdict.DUPLICATE:
            self.ledger.end_lease(message.token, "generation_failed", f"chunk refused: {verdict}")
            return self._refuse(session, received, f"chunk refused: {verdict}", len(ids))
        self.sessions.send(session, wire.ChunkAck(message.token, lease.sample.length))

    def on_Scored(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if not math.isfinite(message.reward):
            raise wire.WireError("a reward is a finite number")
        if not self._holds(session.uid, message.token):
            return self._refuse(session, received, "the lease is not current")
        if self.ledger.score(message.token, message.reward) is Verdict.GAP:
            sample = self.ledger.leases[message.token].sample
            return self.sessions.send(session, wire.ResendFrom(message.token, sample.length))
        self.sessions.send(session, wire.Done(message.token))

    def on_GiveBack(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if not self._holds(session.uid, message.token):
            return self._refuse(session, received, "the lease is not current")
        sample = self.ledger.leases[message.token].sample
        if message.length > sample.length:
            return self.sessions.send(session, wire.ResendFrom(message.token, sample.length))
        error = limits.clip(message.error)
        if error:
            log.warning("sample %d.%d came back: %s: %s", sample.group.id, sample.index, message.cause, error)
        self.ledger.end_lease(message.token, message.cause, error)
        self.sessions.send(session, wire.Done(message.token))

    def _refuse(self, session: Session, received: wire.Received, reason: str, tokens: int = 0) -> None:
        self.sessions.tallies[session.uid].refused += tokens
        self.sessions.refuse(reason, reason, session.data_route, received.message.token, session.id, received.sequence)

    # --- leases ---------------------------------------------------------------------------------------------

    def hand_out(self, now: float) -> None:
        """Fill every worker as far as it has room, the emptiest first."""
        able = [s for s in self.sessions.workers() if s.version and s.control_route and self._load(s) < s.capacity]
        emptiest = [(self._load(session) / session.capacity, session.id, session) for session in able]
        heapq.heapify(emptiest)
        while emptiest:
            _, number, session = emptiest[0]
            if not self._grant_one(session, now) or self._load(session) >= session.capacity:
                heapq.heappop(emptiest)
            else:
                heapq.heapreplace(emptiest, (self._load(session) / session.capacity, number, session))

    def _load(self, session: Session) -> int:
        return self.ledger.load[session.uid, False] + self.ledger.load[session.uid, True]

    def _grant_one(self, session: Session, now: float) -> bool:
        step = session.version.step
        sample = (
            self.ledger.queue.take_scoring()
            or self.service.schedule.urgent_sample(self.ledger, step)
            or self._evaluation_sample(session)
            or self.service.schedule.next_sample(self.ledger, step)
        )
        if sample is None:
            return False
        lease = self.ledger.lease(sample, session.uid, step, now + self.config.broker.lease_s)
        self._send_grant(session, lease)
        return True

    def _evaluation_sample(self, session: Session) -> Sample | None:
        """Evaluation has a capped share of the slots, unless there is nothing else to do."""
        share = self.ledger.load[session.uid, True] / session.capacity
        if share >= self.config.evaluation.share and self.ledger.round_open:
            return None
        return self.ledger.queue.take_evaluation(session.version.step)

    def _send_grant(self, session: Session, lease: Lease) -> None:
        sample, group, sampling = lease.sample, lease.sample.group, self.config.sampling
        row = self.service.row_of(group)
        prompt = self._prompt_tokens(sample)
        grant = wire.Grant(
            token=lease.token,
            group=group.id,
            index=sample.index,
            scoring=lease.scoring,
            evaluation=group.evaluation,
            prompt_tokens=len(prompt),
            max_new_tokens=sampling.max_response_tokens - sample.length,
            seed=sample_seed(self.config.seed, group.id, sample.index),
            temperature=self.config.evaluation.temperature if group.evaluation else sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            label=row.label,
            reward=row.reward or self.config.reward.name,
            finish_reason=sample.finish_reason,
        )
        tokens = np.concatenate([prompt, *(ids for ids, _ in self.service.read_chunks(sample))])
        self.sessions.send(session, grant, [tokens])

    def _prompt_tokens(self, sample: Sample) -> np.ndarray:
        opened = self.service.journal.read(sample.group.prompt)
        assert isinstance(opened, GroupOpened)
        return np.frombuffer(opened.prompt, "<i4")

    # --- aborts and losses ----------------------------------------------------------------------------------

    def abort(self, now: float) -> None:
        """The round is over: every training sample that is being generated comes back, within a deadline."""
        deadline = now + self.config.broker.abort_deadline_s
        aborted = [lease for lease in self.ledger.leases.values() if self.ledger.is_aborted(lease.token)]
        for lease in aborted:
            lease.expires_at = min(lease.expires_at, deadline)
        self.recorder.aborted(len(aborted))
        busy = {lease.worker for lease in aborted}
        for session in self.sessions.workers():
            if session.uid in busy:
                self.recorder.lane(session.name, "abort", now, now)
        self.sessions.broadcast(wire.Abort(self.ledger.round, self.ledger.watermark))

    def drop_silent(self, now: float) -> None:
        """End the sessions of workers that have not been heard of, and the leases that were not renewed."""
        for session in self.sessions.workers():
            if now - session.last_seen > self.config.broker.session_timeout_s:
                self.lose(session, f"silent for {self.config.broker.session_timeout_s:g} s", now)
        for lease in self.ledger.expire(now):
            self._cancel(lease.worker, lease.token)

    def cancel_voided(self) -> None:
        """Tell the workers which of their samples have gone with their group."""
        voided, self.ledger.voided = self.ledger.voided, []
        for worker, token in voided:
            self._cancel(worker, token)

    def _cancel(self, worker: str, token: int) -> None:
        if session := self.sessions.of_uid(worker):
            self.sessions.send_control(session, wire.Cancel([token]))


def chunk_arrays(event: ChunkAccepted) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(event.ids, "<i4"), np.frombuffer(event.logprobs, "<f4")
