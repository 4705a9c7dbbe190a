"""The broker's side of the conversation with workers: leases out, chunks in, aborts."""

import heapq
import math

import numpy as np

from april import wire
from april.broker.books import Books
from april.broker.desks.grants import send_grant
from april.broker.desks.holders import HolderDesk
from april.broker.ledger.ledger import Verdict
from april.broker.ledger.samples import Lease, Sample
from april.broker.schedules.schedule import choose_sample
from april.broker.sessions import Session
from april.data.support import Support
from april.wire import limits, rows

PASS_GRANTS = 256
"""most that are granted in one pass: a crowd that gets room all at once does not keep other messages waiting"""


class WorkerDesk(HolderDesk):
    def __init__(self, books: Books):
        super().__init__(books)
        self.max_leases = books.config.security.max_leases
        self.largest_id = (books.config.vocabulary or 1 << 31) - 1
        self.newest_step = 0
        """of the versions that workers have reported"""
        self.hungry: dict[int, Session] = {}
        """sessions that may have room: all that were heard of since they were last full"""
        self.has_more = False
        """whether the last pass ended with its grants"""

    def mark(self, session: Session, instant: str, now: float) -> None:
        """In the worker's lane."""
        self.recorder.lane(session.name, instant, now, now)

    def cancel(self, session: Session, lease_id: int) -> None:
        self.hungry[session.id] = session
        super().cancel(session, lease_id)

    # --- what workers report --------------------------------------------------------------------------------

    def on_Holding(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if not self.ledger.was_published(message.version.step, message.version.branch):
            raise wire.WireError("nobody can hold a version that was never published")
        if not 0 <= message.loaded_in_s < math.inf:
            raise wire.WireError("loading takes a finite time")
        session.version = message.version
        self.newest_step = max(self.newest_step, message.version.step)
        session.capacity = min(message.capacity, self.config.security.max_leases)
        if session.capacity < message.capacity:
            self.books.audit.say("worker %s gets room for %d leases, no more", session.name, session.capacity)
        if message.loaded_in_s:
            self.recorder.lane(session.name, "weights", now - message.loaded_in_s, now)

    def on_Lane(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if not (math.isfinite(message.start) and math.isfinite(message.end)):
            raise wire.WireError("a span has finite ends")
        self.recorder.lane(session.name, message.kind, message.start, message.end)

    def on_Chunk(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        dtypes = tuple(packed.dtype for packed in received.packed)
        if dtypes not in (wire.CHUNK_ARRAYS, wire.CHUNK_ARRAYS[:2]):
            raise wire.WireError("a chunk carries ids int32, logprobs float32, and their supports, if any, int32")
        ids, logprobs, *support = received.arrays
        if not len(ids) or ids.shape != logprobs.shape or not np.isfinite(logprobs).all():
            raise wire.WireError("a chunk has at least one token, and a finite logprob for each")
        self._check_tokens(ids)
        if support:
            self._check_support(ids, Support(*support))
        if not self._holds(session.uid, message.lease_id):
            return self._refuse(session, received, "the lease is not current", len(ids))
        lease = self.ledger.leases[message.lease_id]
        if bool(support) != (self.config.sampling.is_cut and not lease.sample.group.evaluation):
            raise wire.WireError("training tokens come with their supports where the distribution is cut, no others do")
        payload = b"".join(packed.data for packed in received.packed)
        row = rows.chunk_row(
            message.lease_id, message.start, len(ids), message.version, message.finish_reason, payload, now
        )
        [verdict] = self.ledger.add_chunks(rows.pack_rows([row]), payload)
        if verdict is Verdict.OK:
            self.sessions.tallies[session.uid].acknowledged += len(ids)
            session.acknowledged(now, len(ids))
            self.recorder.tokens(len(ids), lease.sample.group.evaluation)
        self._answer(session, received, lease, verdict, len(ids), now)

    def on_Observation(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if not self.config.environment.name:
            raise wire.WireError("this run has no environment")
        if [packed.dtype for packed in received.packed] != ["i4"]:
            raise wire.WireError("an observation carries ids int32")
        [ids] = received.arrays
        if not len(ids) or len(message.state) > limits.STATE_BYTES:
            raise wire.WireError(
                f"an observation has at least one token, and a state of at most {limits.STATE_BYTES} bytes"
            )
        self._check_tokens(ids)
        if not self._holds(session.uid, message.lease_id):
            return self._refuse(session, received, "the lease is not current")
        lease, payload = self.ledger.leases[message.lease_id], bytes(received.packed[0].data) + message.state
        row = rows.observation_row(
            message.lease_id, message.start, len(ids), message.finish_reason, payload, message.failed, now
        )
        [verdict] = self.ledger.add_chunks(rows.pack_rows([row]), payload)
        if verdict is Verdict.OK:
            self.recorder.observed(len(ids), message.failed)
        self._answer(session, received, lease, verdict, 0, now)

    def _check_tokens(self, ids: np.ndarray) -> None:
        self._check_ids(ids)
        if len(ids) > limits.CHUNK_TOKENS:
            raise wire.WireError(f"a chunk has at most {limits.CHUNK_TOKENS} tokens")

    def _check_ids(self, ids: np.ndarray) -> None:
        if ids.view("<u4").max() > self.largest_id:  # a negative one is larger than any
            raise wire.WireError(f"the policy's token ids are from 0 to {self.largest_id}")

    def _check_support(self, ids: np.ndarray, support: Support) -> None:
        if not support.holds(ids) or support.counts.max() > limits.SUPPORT_IDS:
            raise wire.WireError(
                f"a support has at most {limits.SUPPORT_IDS} ids, and the token that was drawn among them"
            )
        self._check_ids(support.ids)

    def _answer(
        self, session: Session, received: wire.Received, lease: Lease, verdict: Verdict, sampled: int, now: float
    ) -> None:
        """Say what became of a chunk or an observation; `sampled`: the tokens that count as refused if they are."""
        lease_id = received.message.lease_id
        if verdict is Verdict.GAP:
            return self.sessions.send(session, wire.ResendFrom(lease_id, lease.sample.length))
        if verdict not in (Verdict.OK, Verdict.DUPLICATE):
            self.ledger.end_lease(lease_id, "generation_failed", f"chunk refused: {verdict}", now)
            return self._refuse(session, received, f"chunk refused: {verdict}", sampled)
        self.sessions.acknowledge(session, lease_id, lease.sample.length)
        if lease_id not in self.ledger.leases:
            self.sessions.acknowledge(session, lease_id)

    # --- leases ---------------------------------------------------------------------------------------------

    def hand_out(self, now: float) -> None:
        """Fill every worker as far as it has room, so much in a pass; nothing while the broker is drained.

        A sample goes to the emptiest, or, if it has room, to the one at the same policy step that has its prefix in
        cache. What one worker cannot be given, no other at the same policy step or before it can.
        """
        self.has_more = False
        if self.ledger.draining:
            return
        first = next((session for session in self.hungry.values() if self._is_foremost(session)), None)
        sample = self._choose(first) if first else None
        if first and sample is None:
            return
        able = {session.uid: session for session in self.hungry.values() if self._has_room(session)}
        self.hungry = {session.id: session for session in able.values()}
        left = PASS_GRANTS
        if first and sample:
            self._grant(sample, first, able, now)
            left -= 1
        emptiest = [(self._fullness(session), session.id, session) for session in able.values()]
        heapq.heapify(emptiest)
        nothing_up_to = -1
        while emptiest and left:
            noted, number, session = emptiest[0]
            if (fullness := self._fullness(session)) != noted:
                heapq.heapreplace(emptiest, (fullness, number, session))
            elif session.step <= nothing_up_to or not self._has_room(session):
                heapq.heappop(emptiest)
            elif sample := self._choose(session):
                self._grant(sample, session, able, now)
                left -= 1
            else:
                nothing_up_to = session.step
        self.has_more = not left

    def _is_foremost(self, session: Session) -> bool:
        """Whether it has room and the newest weights that any worker has held: nothing for it is nothing for all."""
        return session.version is not None and session.version.step >= self.newest_step and self._has_room(session)

    def _has_room(self, session: Session) -> bool:
        if session.id not in self.sessions.by_id:
            return False
        if session.version is None or not session.control_route or self._load(session) >= session.capacity:
            return False
        if len(self.ledger.held.get(session.uid, ())) >= self.max_leases:
            return False
        return self.sessions.has_credit(session, self.books.credit_bytes)

    def _load(self, session: Session) -> int:
        of_key = self.ledger.load.get
        return of_key((session.uid, False), 0) + of_key((session.uid, True), 0)

    def _fullness(self, session: Session) -> float:
        return self._load(session) / session.capacity

    def _choose(self, session: Session) -> Sample | None:
        share_left = self._evaluation_share_left(session)
        return choose_sample(self.books.schedule, self.ledger, session.step, share_left)

    def _grant(self, sample: Sample, session: Session, able: dict[str, Session], now: float) -> None:
        """To `session`, for which it was chosen, or to the worker of `able` that has its prefix in cache."""
        step = session.step
        home = able.get(sample.cached_by(step))
        if home and home.step == step and self._has_room(home):
            session = home
        lease_s, max_run_s = self.config.broker.lease_s, self.config.broker.max_run_s
        lease = self.ledger.lease(sample, session.uid, step, now + lease_s, now + max_run_s)
        send_grant(self.books, session, lease)

    def _evaluation_share_left(self, session: Session) -> bool:
        return self.ledger.load.get((session.uid, True), 0) < self.config.evaluation.share * session.capacity

    def abort(self, now: float) -> None:
        """The round is over: every training sample that is being generated comes back, within a deadline."""
        deadline = now + self.config.broker.abort_deadline_s
        aborted = [lease for lease in self.ledger.leases.values() if self.ledger.is_aborted(lease.id)]
        for lease in aborted:
            self.ledger.expire_at(lease, min(lease.expires_at, deadline))
        self.recorder.aborted(len(aborted))
        busy = {lease.worker for lease in aborted}
        for session in self.sessions.workers():
            if session.uid in busy:
                self.recorder.lane(session.name, "abort", now, now)
        self.sessions.broadcast(wire.Abort(self.ledger.round, self.ledger.watermark))
