"""The broker's side of the conversation with workers: leases out, chunks in, aborts."""

import heapq
import math
from collections.abc import Callable
from itertools import compress
from typing import Any

import numpy as np

from april import wire
from april.broker.books import Books
from april.broker.desks.holders import NOT_CURRENT, HolderDesk
from april.broker.desks.reports import RowChecks, read_report
from april.broker.desks.shares import Shares
from april.broker.ledger.admission import Verdict
from april.broker.ledger.samples import Lease, Sample
from april.broker.migration import LOOK_S, Migration, Seat
from april.broker.schedules.schedule import choose_sample
from april.broker.sessions import Session
from april.wire.rows import CHUNK, Buffer

TellAgents = Callable[[np.ndarray, Buffer, list[Lease | None]], None]
PASS_GRANTS = 256
"""most that are granted in one pass: a crowd that gets room all at once does not keep other messages waiting"""
PACE_S = 2.0
"""over which a worker's pace is taken for that"""


class WorkerDesk(HolderDesk):
    def __init__(self, books: Books, tell_agents: TellAgents):
        super().__init__(books)
        self.tell_agents = tell_agents
        self.max_leases = books.config.security.max_leases
        self.checks = RowChecks(books.config)
        self.newest_step = 0
        """of the versions that workers have reported"""
        self.hungry: dict[int, Session] = {}
        """sessions that may have room: all that were heard of since they were last full"""
        self.has_more = False
        """whether the last pass ended with its grants"""
        self.shares = Shares() if books.schedule.by_rounds else None
        self.migration = Migration() if books.config.schedule.migrate else None
        self._next_look = 0.0

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
        if self.shares and message.version.step > self.newest_step:
            self.shares.first_has(message.loaded_in_s, now)
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

    def take_rows(self, session: Session, packed: list[wire.Packed], now: float) -> None:
        """Each row is taken or not by itself."""
        table, payload = read_report(packed)
        lease_ids = table["lease_id"].tolist()
        leases = [self.ledger.leases.get(lease_id) for lease_id in lease_ids]
        wrong = self.checks.faults(table, payload, leases)
        verdicts = self.ledger.add_chunks(packed[0].data, payload.data, session.uid, wrong, payload.checksum)
        if self.ledger.rules.agents:
            accepted = [
                lease if verdict is Verdict.OK else None for lease, verdict in zip(leases, verdicts, strict=True)
            ]
            self.tell_agents(table, payload.data, accepted)
        if verdicts.count(Verdict.OK) < len(verdicts):
            for place, (lease_id, lease, verdict) in enumerate(zip(lease_ids, leases, verdicts, strict=True)):
                if verdict is not Verdict.OK:
                    self._answer_refused(session, lease_id, lease, verdict, wrong.get(place, ""), table[place], now)
            taken = [verdict is Verdict.OK for verdict in verdicts]
            table, leases = table[taken], list(compress(leases, taken))
        self._acknowledge(session, table)
        self._count(session, table, leases, now)

    def _acknowledge(self, session: Session, table: np.ndarray) -> None:
        """Rows that were taken, those of a lease in order: the last one says how long its response is by now."""
        answers, lease_ids = self.sessions.answers_to(session), table["lease_id"]
        ends = table["start"].astype(np.int64) + table["tokens"]
        answers.lengths.update(zip(lease_ids.tolist(), ends.tolist(), strict=True))
        ended = lease_ids[table["finish"] > 0].tolist()
        answers.done += [lease_id for lease_id in ended if lease_id not in self.ledger.leases]

    def _count(self, session: Session, table: np.ndarray, leases: list[Lease | None], now: float) -> None:
        """Rows that were taken, and their leases."""
        sampled, tokens = table["kind"] == CHUNK, table["tokens"].astype(np.int64)
        chunks, accepted = [int(sampled.sum()), 0], [int(tokens[sampled].sum()), 0]
        if self.ledger.evaluations:
            uses = sampled & np.array([lease.sample.group.evaluation for lease in leases if lease], bool)
            chunks[1], accepted[1] = int(uses.sum()), int(tokens[uses].sum())
            chunks[0], accepted[0] = chunks[0] - chunks[1], accepted[0] - accepted[1]
        self.sessions.tallies[session.uid].acknowledged += sum(accepted)
        session.acknowledged(now, sum(accepted))
        self.recorder.accept(chunks, accepted)
        if self.migration:
            self.migration.reported(session.uid, self._load(session), sum(accepted), now, PACE_S)
            if self.migration.arriving:
                self._note_arrivals(self.migration, tokens, leases, now)
        if not sampled.all():
            answered = table[~sampled]
            self.recorder.observed(len(answered), int(answered["tokens"].sum()), int(answered["failed"].sum()))

    def _note_arrivals(self, migration: Migration, tokens: np.ndarray, leases: list[Lease | None], now: float) -> None:
        for lease, count in zip(leases, tokens.tolist(), strict=True):
            if lease and lease.id in migration.arriving:
                migration.went_on(lease, count, self.ledger.load[lease.worker, False], now)

    def _answer_refused(
        self, session: Session, lease_id: int, lease: Lease | None, verdict: Verdict, fault: str, row: Any, now: float
    ) -> None:
        """Say what became of a row that was not taken."""
        sampled = int(row["tokens"]) if row["kind"] == CHUNK else 0
        if lease is None or not self._holds(session.uid, lease_id):
            self.refuse(session, lease_id, NOT_CURRENT, sampled)
        elif verdict is Verdict.DUPLICATE:
            self.sessions.acknowledge(session, lease_id, lease.sample.length)
        elif verdict is Verdict.GAP:
            self.sessions.ask_again(session, lease_id, lease.sample.length)
        elif fault:
            self.refuse(session, lease_id, f"bad row: {fault}", sampled)
        elif verdict is not Verdict.DROPPED:
            reason = f"chunk refused: {verdict}"
            self.ledger.end_lease(lease_id, "generation_failed", reason, now)
            self.refuse(session, lease_id, reason, sampled)

    # --- leases ---------------------------------------------------------------------------------------------

    def hand_out(self, now: float) -> None:
        """Fill every worker as far as it has room, so much in a pass; nothing while the broker is drained. What has
        come back to move goes first, and where nothing waits, more may be asked for."""
        self.has_more = False
        if self.ledger.draining:
            return
        if self.migration:
            self._grant_moved(self.migration, now)
        self._fill(now)
        if self.migration and not self.has_more and now >= self._next_look:
            self._next_look = now + LOOK_S
            self._recall(self.migration, now)

    def _grant_moved(self, migration: Migration, now: float) -> None:
        for move in migration.returned(self.ledger, now):
            session = self.sessions.of_uid(move.target)
            if session is None or not self._has_room(session) or session.step < move.sample.first_step:
                continue
            if self.books.schedule.hands_out(self.ledger, session.step):
                migration.moved(self.lease(move.sample, session, session.step, now), now)
                self.recorder.moved("done")

    def _recall(self, migration: Migration, now: float) -> None:
        """Ask stragglers back for workers that have room for them."""
        holders = {session.uid: session for session in self.sessions.workers()}
        seats = [
            Seat(uid, self._load(session), self._has_room(session), session.step) for uid, session in holders.items()
        ]
        for move in migration.choose(self.ledger, seats, now):
            holder = holders[self.ledger.leases[move.lease_id].worker]
            self.sessions.send_control(holder, wire.Cancel([move.lease_id], hand_back=True))
            self.recorder.moved("asked")

    def _fill(self, now: float) -> None:
        """A sample goes to the emptiest, or, if it has room, to the one at the same policy step that has its prefix in
        cache. What one worker cannot be given, no other at the same policy step or before it can. While others take in
        the same weights, nobody gets more than its share.
        """
        fullest = math.inf
        if self.shares:
            fullest = self.shares.fullest(self.sessions.workers(), self.newest_step, self.ledger, now)
        first = self._first_of_hungry(fullest)
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
            elif session.step <= nothing_up_to or fullness >= fullest or not self._has_room(session):
                heapq.heappop(emptiest)
            elif sample := self._choose(session):
                self._grant(sample, session, able, now)
                left -= 1
            else:
                nothing_up_to = session.step
        self.has_more = not left

    def _first_of_hungry(self, fullest: float) -> Session | None:
        """One with room and the newest weights that any worker has held: nothing for it is nothing for all. Those
        without room that are met on the way are hungry no more."""
        for number, session in list(self.hungry.items()):
            if not self._has_room(session):
                del self.hungry[number]
            elif session.step >= self.newest_step and self._fullness(session) < fullest:
                return session
        return None

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
        self.lease(sample, session, session.step, now)

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
