"""The broker's side of the conversation with workers: leases out, chunks and scores in, aborts and losses."""

import heapq
import logging
import math
from typing import TYPE_CHECKING

import numpy as np

from april import limits, wire
from april.broker.ledger import Verdict
from april.broker.prompts import sample_seed
from april.broker.samples import Lease, Sample
from april.broker.schedule import choose_sample
from april.broker.sessions import Session
from april.support import Support

if TYPE_CHECKING:
    from april.broker.service import Service

log = logging.getLogger(__name__)

TURN_GRANTS = 256
"""most that are granted in one turn: a crowd that gets room all at once does not keep other messages waiting"""


class WorkerDesk:
    def __init__(self, service: "Service"):
        self.service = service
        self.config = service.config
        self.ledger = service.ledger
        self.sessions = service.sessions
        self.recorder = service.recorder
        self.max_leases = service.config.security.max_leases
        self.largest_id = (service.config.vocabulary or 1 << 31) - 1
        self.newest_step = 0
        """of the versions that workers have reported"""
        self.hungry: dict[int, Session] = {}
        """sessions that may have room: all that were heard of since they were last full"""
        self.has_more = False
        """whether the last turn ended with its grants"""

    # --- coming and going -----------------------------------------------------------------------------------

    def hello(self, session: Session, hello: wire.Hello, now: float) -> list[int]:
        """Take in a worker or scorer; returns those of its leases that are lost. A namesake of another process is
        dead."""
        for other in self.sessions.holders():
            if other is not session and other.uid == hello.uid:
                self.sessions.close(other)
            elif other is not session and (other.role, other.name) == (hello.role, hello.name):
                self.sessions.send_control(other, wire.Stop(f"another {hello.role} has taken the name {hello.name}"))
                self.lose(other, "its successor has arrived", now)
        held = {token for token in hello.leases if self._holds(hello.uid, token)}
        self.ledger.renew(list(held), now + self.config.broker.lease_s)
        for lease in self.leases_of(hello.uid):
            if lease.token not in held:
                self.ledger.end_lease(lease.token, "lost", "its worker came back without it", now)
        self._mark(session, "joined", now)
        return [token for token in hello.leases if token not in held]

    def lose(self, session: Session, why: str, now: float) -> None:
        """A worker or scorer is gone: all that it held waits for another."""
        leases = self.leases_of(session.uid)
        who, ids = f"{session.role} {session.name}", {"worker": session.name}
        log.warning("%s is lost (%s); %d leases wait for another", who, why, len(leases), extra=ids)
        for lease in leases:
            self.ledger.end_lease(lease.token, "lost", f"{who} was lost: {why}", now)
        self._mark(session, "lost", now)
        self.sessions.close(session)

    def _mark(self, session: Session, instant: str, now: float) -> None:
        """Record an instant of a worker's lane; scorers have none."""
        if session.role == "worker":
            self.recorder.lane(session.name, instant, now, now)

    def goodbye(self, session: Session, now: float) -> None:
        for lease in self.leases_of(session.uid):
            self.ledger.end_lease(lease.token, "leave")
        self.sessions.close(session)

    def leases_of(self, uid: str) -> list[Lease]:
        return [self.ledger.leases[token] for token in sorted(self.ledger.held.get(uid, ()))]

    def _holds(self, uid: str, token: int) -> bool:
        lease = self.ledger.leases.get(token)
        return lease is not None and lease.worker == uid

    # --- what workers report --------------------------------------------------------------------------------

    def on_Heartbeat(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if len(message.leases) > self.config.security.max_leases:
            raise wire.WireError("more leases than a worker may hold")
        tally = self.sessions.tallies[session.uid]
        tally.emitted = max(tally.emitted, message.emitted_tokens)
        mine = {token for token in message.leases if self._holds(session.uid, token)}
        self.ledger.renew(list(mine), now + self.config.broker.lease_s)
        self.sessions.answer_heartbeat(session, [token for token in message.leases if token not in mine])

    def on_Holding(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if not self.ledger.was_published(message.version):
            raise wire.WireError("nobody can hold a version that was never published")
        if not 0 <= message.loaded_in_s < math.inf:
            raise wire.WireError("loading takes a finite time")
        session.version = message.version
        self.newest_step = max(self.newest_step, message.version.step)
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
        dtypes = tuple(packed.dtype for packed in received.packed)
        if dtypes not in (wire.CHUNK_ARRAYS, wire.CHUNK_ARRAYS[:2]):
            raise wire.WireError("a chunk carries ids int32, logprobs float32, and their supports, if any, int32")
        ids, logprobs, *support = received.arrays
        if not len(ids) or ids.shape != logprobs.shape or not np.isfinite(logprobs).all():
            raise wire.WireError("a chunk has at least one token, and a finite logprob for each")
        self._check_tokens(ids)
        if support:
            self._check_support(ids, Support(*support))
        if not self._holds(session.uid, message.token):
            return self._refuse(session, received, "the lease is not current", len(ids))
        lease = self.ledger.leases[message.token]
        if bool(support) != (self.config.sampling.is_cut and not lease.sample.group.evaluation):
            raise wire.WireError("training tokens come with their supports where the distribution is cut, no others do")
        verdict = self.ledger.add_chunk(
            message.token, message.start, len(ids), message.version, message.finish_reason,
            [(packed.checksum, packed.data) for packed in received.packed],
        )  # fmt: skip
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
        if not self._holds(session.uid, message.token):
            return self._refuse(session, received, "the lease is not current")
        lease, nobodys = self.ledger.leases[message.token], [wire.pack(np.zeros(len(ids), "<f4"))]
        if self.config.sampling.is_cut:
            nobodys += [wire.pack(np.zeros(len(ids), "<i4")), wire.pack(np.zeros(0, "<i4"))]
        verdict = self.ledger.add_observation(
            message.token, message.start, len(ids), message.state, message.finish_reason, message.failed,
            [(packed.checksum, packed.data) for packed in (*received.packed, *nobodys)],
        )  # fmt: skip
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
        token = received.message.token
        if verdict is Verdict.GAP:
            return self.sessions.send(session, wire.ResendFrom(token, lease.sample.length))
        if verdict not in (Verdict.OK, Verdict.DUPLICATE):
            self.ledger.end_lease(token, "generation_failed", f"chunk refused: {verdict}", now)
            return self._refuse(session, received, f"chunk refused: {verdict}", sampled)
        self.sessions.acknowledge(session, token, lease.sample.length)
        if token not in self.ledger.leases:
            self.sessions.acknowledge(session, token)

    def on_Scored(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        check_rewards([message.reward], [message.details])
        if not self._holds(session.uid, message.token):
            return self._refuse(session, received, "the lease is not current")
        verdict = self.ledger.score(message.token, message.reward, message.details)
        if verdict is Verdict.GAP:
            sample = self.ledger.leases[message.token].sample
            return self.sessions.send(session, wire.ResendFrom(message.token, sample.length))
        if verdict is Verdict.INVALID:
            raise wire.WireError("a lease on a group wants the scores of all its responses")
        self.sessions.acknowledge(session, message.token)

    def on_ScoredTogether(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        check_rewards(message.rewards, message.details)
        if not self._holds(session.uid, message.token):
            return self._refuse(session, received, "the lease is not current")
        if self.ledger.score_group(message.token, message.rewards, message.details) is Verdict.INVALID:
            raise wire.WireError("scores of a group are for a lease on it, one for each of its responses")
        self.sessions.acknowledge(session, message.token)

    def on_GiveBack(self, session: Session, received: wire.Received, now: float) -> None:
        message = received.message
        if not self._holds(session.uid, message.token):
            return self._refuse(session, received, "the lease is not current")
        lease = self.ledger.leases[message.token]
        sample = lease.sample
        if not lease.scoring and message.length > sample.length:
            return self.sessions.send(session, wire.ResendFrom(message.token, sample.length))
        error = limits.clip(message.error)
        if error:
            ids = {"worker": session.name, "group": sample.group.id, "sample": sample.index}
            log.warning("sample %d.%d came back: %s: %s", ids["group"], ids["sample"], message.cause, error, extra=ids)
        if message.cause == "environment_failed":
            self.recorder.observed(0, failed=True)
        self.ledger.end_lease(message.token, message.cause, error, now)
        self.sessions.acknowledge(session, message.token)

    def _refuse(self, session: Session, received: wire.Received, reason: str, tokens: int = 0) -> None:
        self.sessions.tallies[session.uid].refused += tokens
        self.sessions.refuse(reason, reason, session.data_route, received.message.token, session.id, received.sequence)

    # --- leases ---------------------------------------------------------------------------------------------

    def hand_out(self, now: float) -> None:
        """Fill every worker as far as it has room, so much in a turn; nothing while the broker is drained.

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
        left = TURN_GRANTS
        if sample:
            self._grant(sample, first, able, now)
            left -= 1
        emptiest = [(self._fullness(session), session.id, session) for session in able.values()]
        heapq.heapify(emptiest)
        nothing_up_to = -1
        while emptiest and left:
            noted, number, session = emptiest[0]
            if (fullness := self._fullness(session)) != noted:
                heapq.heapreplace(emptiest, (fullness, number, session))
            elif session.version.step <= nothing_up_to or not self._has_room(session):
                heapq.heappop(emptiest)
            elif sample := self._choose(session):
                self._grant(sample, session, able, now)
                left -= 1
            else:
                nothing_up_to = session.version.step
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
        return self.sessions.has_credit(session, self.service.credit_bytes)

    def _load(self, session: Session) -> int:
        of_key = self.ledger.load.get
        return of_key((session.uid, False), 0) + of_key((session.uid, True), 0)

    def _fullness(self, session: Session) -> float:
        return self._load(session) / session.capacity

    def _choose(self, session: Session) -> Sample | None:
        share_left = self._evaluation_share_left(session)
        return choose_sample(self.service.schedule, self.ledger, session.version.step, share_left)

    def _grant(self, sample: Sample, session: Session, able: dict[str, Session], now: float) -> None:
        """To `session`, for which it was chosen, or to the worker of `able` that has its prefix in cache."""
        step = session.version.step
        home = able.get(sample.cached_by(step))
        if home and home.version.step == step and self._has_room(home):
            session = home
        lease_s, max_run_s = self.config.broker.lease_s, self.config.broker.max_run_s
        lease = self.ledger.lease(sample, session.uid, step, now + lease_s, now + max_run_s)
        self.send_grant(session, lease)

    def _evaluation_share_left(self, session: Session) -> bool:
        return self.ledger.load.get((session.uid, True), 0) < self.config.evaluation.share * session.capacity

    def send_grant(self, session: Session, lease: Lease) -> None:
        sample, group, sampling = lease.sample, lease.sample.group, self.config.sampling
        drawn = self.config.evaluation if group.evaluation else sampling
        row = self.service.row_of(group.evaluation, group.epoch, group.row)
        observations = sample.observations if sample.length else []
        grant = wire.Grant(
            token=lease.token,
            group=group.id,
            index=sample.index,
            scoring=lease.scoring,
            evaluation=group.evaluation,
            max_new_tokens=sampling.max_response_tokens - sample.length,
            seed=sample_seed(self.config.seed, group.id, sample.index),
            temperature=drawn.temperature,
            top_p=drawn.top_p,
            top_k=drawn.top_k,
            min_p=0.0 if group.evaluation else sampling.min_p,
            label=row.label,
            reward=self.service.reward_of(row),
            finish_reason=sample.finish_reason,
            hand_over=not lease.scoring and self.ledger.is_handed_over(group),
            together=[one.finish_reason for one in lease.samples] if lease.on_group else [],
            turns=len(observations),
            turn_start=observations[-1][1] if observations else 0,
            state=self.service.environment_state(sample) if observations else b"",
        )
        if lease.on_group:
            pieces = [self.service.read_response(one)[0] for one in lease.samples]
        else:
            pieces = [ids for ids, *_ in self.service.read_chunks(sample)]
        self.sessions.send(session, grant, [self.service.read_prompt(group.prompt), *pieces])

    # --- aborts and losses ----------------------------------------------------------------------------------

    def abort(self, now: float) -> None:
        """The round is over: every training sample that is being generated comes back, within a deadline."""
        deadline = now + self.config.broker.abort_deadline_s
        aborted = [lease for lease in self.ledger.leases.values() if self.ledger.is_aborted(lease.token)]
        for lease in aborted:
            self.ledger.expire_at(lease, min(lease.expires_at, deadline))
        self.recorder.aborted(len(aborted))
        busy = {lease.worker for lease in aborted}
        for session in self.sessions.workers():
            if session.uid in busy:
                self.recorder.lane(session.name, "abort", now, now)
        self.sessions.broadcast(wire.Abort(self.ledger.round, self.ledger.watermark))

    def drop_silent(self, now: float) -> None:
        """End the sessions of holders that have not been heard of, and the leases that were not renewed."""
        for session in self.sessions.holders():
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
            self.hungry[session.id] = session
            self.sessions.send_control(session, wire.Cancel([token]))


def check_rewards(rewards: list[float], details: list[dict[str, float]]) -> None:
    if not all(map(limits.is_reward, rewards)):
        raise wire.WireError(f"a reward is a finite number up to {limits.REWARD:g}")
    if any(len(one) > limits.DETAILS or not all(map(limits.is_reward, one.values())) for one in details):
        raise wire.WireError(f"a reward has at most {limits.DETAILS} details, finite numbers up to {limits.REWARD:g}")
