"""Handles messages of workers: grants leases, accepts chunks of tokens, and aborts generation at the end of a round."""

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import numpy as np

from april import wire
from april.broker.context import BrokerContext
from april.broker.handlers.evaluations import Evaluations
from april.broker.handlers.images import send_images
from april.broker.handlers.lease_holders import NOT_CURRENT, LeaseHolderHandler
from april.broker.handlers.reports import RowValidator
from april.broker.ledger.admission import Verdict
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.samples import TO_GENERATE, GroupState, Lease, Sample
from april.broker.migration import CHOICE_INTERVAL_S, Migration, WorkerLoad
from april.broker.peers import Peer
from april.broker.schedules.schedule import choose_sample
from april.wire import limits
from april.wire.message import Version
from april.wire.rows import CHUNK, Buffer

# --- limit of the load ------------------------------------------------------------------------------------------------


LONGEST_FILL_LIMIT_S = 10.0
"""Longest duration of a `FillLimit`, seconds. Otherwise the limit lasts as long as the first worker took to load the
new weights."""


class FillLimit:
    """Limits the load of workers that already have the newest weights, so that samples are left for workers that still
    load them."""

    def __init__(self) -> None:
        self._until = 0.0

    def first_loaded(self, loaded_in_s: float, now: float) -> None:
        """Start the limit when the first worker has loaded new weights, which took it `loaded_in_s` seconds."""
        self._until = now + min(loaded_in_s, LONGEST_FILL_LIMIT_S)

    def max_load(self, workers: Sequence[Peer], newest_step: int, ledger: Ledger, now: float) -> float:
        """Largest load that a worker may have, as a share of its capacity: the load of all workers if they shared all
        training samples evenly. Infinite while there is no limit. `newest_step`: newest policy step that any worker has
        loaded."""
        if now >= self._until or not ledger.rounds.open:
            return math.inf
        loaded = [worker for worker in workers if worker.version is not None and worker.capacity]
        if all(worker.step >= newest_step for worker in loaded):
            self._until = 0.0
            return math.inf
        if not (waiting := sum(map(ledger.open_samples.count, TO_GENERATE))):
            return math.inf
        return (waiting + ledger.leases.generating) / sum(worker.capacity for worker in loaded)


# --- workers ----------------------------------------------------------------------------------------------------------


ForwardRows = Callable[[np.ndarray, Buffer, list[Lease | None]], None]
"""Function that receives rows, their payloads, and the lease of each row (None if the row was refused)."""
PASS_GRANTS = 256
"""Most leases granted in one pass of the broker's loop, so that many workers with room do not keep other messages
waiting."""
STANDSTILL_S = 30.0
"""Seconds in which nothing can progress, after which a run ends; far more than any peer's answer takes."""
SPEED_WINDOW_S = 2.0
"""Length of the window in which a worker's decode speed is measured for migration, seconds."""


class WorkerHandler(LeaseHolderHandler):
    def __init__(self, context: BrokerContext, evaluations: Evaluations, forward_to_agents: ForwardRows):
        super().__init__(context)
        self.evaluations = evaluations
        self.forward_to_agents = forward_to_agents
        self.max_leases = context.config.security.max_leases
        self.validator = RowValidator(context.config)
        self.newest_step = 0
        """Newest policy step that any worker has loaded."""
        self.maybe_ready: dict[int, Peer] = {}
        """Workers that may have room for a lease, by session id: those that sent a message since they were last found
        full."""
        self.has_more = False
        """Whether the last call of `hand_out` stopped at `PASS_GRANTS` leases."""
        self.fill_limit = FillLimit() if context.schedule.by_rounds else None
        self.migration = Migration() if context.config.schedule.migrate else None
        self._next_recall = 0.0
        self._progress: tuple[int, ...] = ()
        self._progress_at = 0.0
        """Time at which the run last progressed. `_progress`: the state then, as (last lease id, next group, next
        batch)."""

    def record_instant(self, peer: Peer, instant: str, now: float) -> None:
        self.recorder.add_span(peer.name, instant, now, now)

    def after_welcome(self, peer: Peer) -> None:
        self.evaluations.greet(peer)

    def cancel(self, peer: Peer, lease_id: int) -> None:
        self.maybe_ready[peer.id] = peer
        super().cancel(peer, lease_id)

    # --- reports --------------------------------------------------------------------------------------------

    def on_weight_folder_refused(self, peer: Peer, received: wire.Received, now: float) -> None:
        version, error = received.message.version, limits.clip(received.message.error)
        ids = {"worker": peer.name, "step": version.step}
        self.context.failures.note("weights_refused", error, f"weights {version} are refused", **ids)

    def on_worker_capacity(self, peer: Peer, received: wire.Received, now: float) -> None:
        message = received.message
        if not self.ledger.was_published(message.version.step, message.version.incarnation):
            raise wire.WireError("nobody can hold a version that was never published")
        loaded_in_s = message.loaded_in_s if 0 <= message.loaded_in_s <= limits.MAX_CLOCK_SKEW_S else 0.0
        peer.version = message.version
        if self.fill_limit and message.version.step > self.newest_step:
            self.fill_limit.first_loaded(loaded_in_s, now)
        self.newest_step = max(self.newest_step, message.version.step)
        peer.capacity = min(message.capacity, self.config.security.max_leases)
        if peer.capacity < message.capacity:
            self.context.audit.warn("worker %s gets room for %d leases, no more", peer.name, peer.capacity)
        if loaded_in_s:
            self.recorder.add_span(peer.name, "weights", now - loaded_in_s, now)

    def on_activity_span(self, peer: Peer, received: wire.Received, now: float) -> None:
        message = received.message
        if all(abs(time_s - now) <= limits.MAX_CLOCK_SKEW_S for time_s in (message.start, message.end)):
            self.recorder.add_span(peer.name, message.kind, message.start, message.end)

    def take_rows(self, peer: Peer, packed: list[wire.PackedArray], now: float) -> None:
        """Accept the chunks and observations of a report; each row is accepted or refused on its own."""
        table, payload = self.validator.read(packed, now)
        lease_ids = table["lease_id"].tolist()
        leases = [self.ledger.leases.get(lease_id) for lease_id in lease_ids]
        faults = self.validator.faults(table, payload, leases)
        verdicts = self.ledger.add_chunks(table.view("u1").data, payload.data, peer.uid, faults, payload.checksum)
        if self.ledger.rules.agents:
            accepted = [
                lease if verdict is Verdict.OK else None for lease, verdict in zip(leases, verdicts, strict=True)
            ]
            self.forward_to_agents(table, payload.data, accepted)
        if verdicts.count(Verdict.OK) < len(verdicts):
            for index, (lease_id, lease, verdict) in enumerate(zip(lease_ids, leases, verdicts, strict=True)):
                if verdict is not Verdict.OK:
                    self._answer_refused(peer, lease_id, lease, verdict, faults.get(index, ""), table[index], now)
            is_accepted = [verdict is Verdict.OK for verdict in verdicts]
            table, leases = table[is_accepted], list(compress(leases, is_accepted))
        self._acknowledge(peer, table)
        self._count(peer, table, leases, now)

    def _acknowledge(self, peer: Peer, table: np.ndarray) -> None:
        """Queue acks of accepted rows (`table`). A lease's rows are in order, so the end of its last row is the
        acknowledged response length."""
        pending, lease_ids = self.peers.pending_for(peer), table["lease_id"]
        ends = table["start"].astype(np.int64) + table["tokens"]
        pending.acks.update(zip(lease_ids.tolist(), ends.tolist(), strict=True))
        ended = lease_ids[table["finish"] > 0].tolist()
        pending.done += [lease_id for lease_id in ended if lease_id not in self.ledger.leases]

    def _count(self, peer: Peer, table: np.ndarray, leases: list[Lease | None], now: float) -> None:
        """Count the tokens of accepted rows (`table`), for the metrics and for the decode speed of the worker `peer`.
        `leases`: the lease of each row."""
        sampled, tokens = table["kind"] == CHUNK, table["tokens"].astype(np.int64)
        chunks, accepted = [int(sampled.sum()), 0], [int(tokens[sampled].sum()), 0]
        if self.ledger.evaluations:
            evaluated = sampled & np.array([lease.sample.group.evaluation for lease in leases if lease], bool)
            chunks[1], accepted[1] = int(evaluated.sum()), int(tokens[evaluated].sum())
            chunks[0], accepted[0] = chunks[0] - chunks[1], accepted[0] - accepted[1]
        self.peers.tallies[peer.uid].acknowledged += sum(accepted)
        peer.note_tokens(now, sum(accepted))
        self.recorder.add_accepted(chunks, accepted)
        if self.migration:
            self.migration.observe_tokens(peer.uid, self._load(peer), sum(accepted), now, SPEED_WINDOW_S)
            if self.migration.arriving:
                self._note_arrivals(self.migration, tokens, leases, now)
        if not sampled.all():
            observed = table[~sampled]
            self.recorder.add_observations(len(observed), int(observed["tokens"].sum()), int(observed["failed"].sum()))

    def _note_arrivals(self, migration: Migration, tokens: np.ndarray, leases: list[Lease | None], now: float) -> None:
        for lease, count in zip(leases, tokens.tolist(), strict=True):
            if lease and lease.id in migration.arriving:
                migration.observe_arrival(lease, count, self.ledger.leases.load[lease.worker, False], now)

    def _answer_refused(
        self, peer: Peer, lease_id: int, lease: Lease | None, verdict: Verdict, fault: str, row: Any, now: float
    ) -> None:
        """Answer a row that the ledger did not accept: with a reject, a nack or, for tokens that it already has, an
        ack. `verdict`: the ledger's; `fault`: fault in the payload, or ""; `row`: element of dtype `TABLE`."""
        sampled = int(row["tokens"]) if row["kind"] == CHUNK else 0
        if lease is None or not self._holds(peer.uid, lease_id):
            self.reject(peer, lease_id, NOT_CURRENT, sampled)
        elif verdict is Verdict.DUPLICATE:
            self.peers.acknowledge(peer, lease_id, lease.sample.length)
        elif verdict is Verdict.GAP:
            self.peers.nack(peer, lease_id, lease.sample.length)
        elif fault:
            self.reject(peer, lease_id, f"{wire.BAD_ROW}{fault}", sampled)
        elif verdict is not Verdict.DROPPED:
            reason = f"chunk refused: {verdict}"
            self.ledger.end_lease(lease_id, "generation_failed", reason, now)
            self.reject(peer, lease_id, reason, sampled)

    # --- leases ---------------------------------------------------------------------------------------------

    def hand_out(self, now: float) -> None:
        """Grant leases to workers with room, at most `PASS_GRANTS` in a pass; none while the broker is drained.

        Migrating samples that their workers have handed back are leased first. When no sample waits, more stragglers
        may be recalled for migration.
        """
        self.has_more = False
        if self.ledger.rounds.draining:
            return
        if self.migration:
            self._grant_moved(self.migration, now)
        self._fill(now)
        if self.migration and not self.has_more and now >= self._next_recall:
            self._next_recall = now + CHOICE_INTERVAL_S
            self._recall(self.migration, now)

    def _grant_moved(self, migration: Migration, now: float) -> None:
        for move in migration.take_returned(self.ledger, now):
            peer = self.peers.holder(move.target)
            if peer is None or not self._has_room(peer) or peer.step < move.sample.first_step:
                continue
            if self.context.schedule.hands_out(self.ledger, peer.step):
                migration.confirm(self.lease(move.sample, peer, peer.step, now), now)
                self.recorder.add_move("done")

    def _recall(self, migration: Migration, now: float) -> None:
        """Ask workers to hand back the stragglers (samples that hold up the next batch) that `migration` chooses, so
        that workers with room finish them sooner."""
        holders = {peer.uid: peer for peer in self.peers.workers()}
        loads = [WorkerLoad(uid, self._load(peer), self._has_room(peer), peer.step) for uid, peer in holders.items()]
        for move in migration.choose(self.ledger, loads, now):
            holder = holders[self.ledger.leases[move.lease_id].worker]
            self.peers.send_control(holder, wire.Cancel([move.lease_id], hand_back=True))
            self.recorder.add_move("asked")

    def _fill(self, now: float) -> None:
        """Grant each waiting sample to the least loaded worker, or to the worker that has the sample's prefix in its KV
        cache.

        A worker with the prefix must have room and the same version. If no training sample fits a worker at step k,
        none fits workers at steps ≤ k either, so only held-out samples are looked for on their behalf. While other
        workers load the newest weights, `FillLimit` bounds the load of each.
        """
        max_load = math.inf
        if self.fill_limit:
            max_load = self.fill_limit.max_load(self.peers.workers(), self.newest_step, self.ledger, now)
        first = self._first_ready(max_load)
        sample = self._choose(first) if first else None
        held_out = self.ledger.evaluations if self.ledger.held_out_waits else {}
        if first and sample is None and not held_out:
            return
        ready = {peer.uid: peer for peer in self.maybe_ready.values() if self._has_room(peer)}
        self.maybe_ready = {peer.id: peer for peer in ready.values()}
        remaining = PASS_GRANTS
        if first and sample:
            self._grant(sample, first, ready, now)
            remaining -= 1
        by_load = [(self._load_share(peer), peer.id, peer) for peer in ready.values()]
        heapq.heapify(by_load)
        exhausted_step, exhausted = -1, set[Version | None]()
        while by_load and remaining:
            queued_load, peer_id, peer = by_load[0]
            if (load := self._load_share(peer)) != queued_load:
                heapq.heapreplace(by_load, (load, peer_id, peer))
            elif (
                load >= max_load
                or not self._has_room(peer)
                or peer.version in exhausted
                or (peer.step <= exhausted_step and peer.step not in held_out)
            ):
                heapq.heappop(by_load)
            elif sample := self._choose(peer):
                self._grant(sample, peer, ready, now)
                remaining -= 1
            else:
                exhausted.add(peer.version)
                exhausted_step = max(exhausted_step, peer.step)
        self.has_more = not remaining

    def _first_ready(self, max_load: float) -> Peer | None:
        """A worker with room, a load of at most `max_load` (share of its capacity) and the newest weights of all
        workers: if no sample fits it, none fits any worker.

        Workers without room that are found before it are removed from `maybe_ready`.
        """
        for peer_id, peer in list(self.maybe_ready.items()):
            if not self._has_room(peer):
                del self.maybe_ready[peer_id]
            elif peer.step >= self.newest_step and self._load_share(peer) < max_load:
                return peer
        return None

    def _has_room(self, peer: Peer) -> bool:
        if peer.id not in self.peers.by_id:
            return False
        if peer.version is None or not peer.control_route or self._load(peer) >= peer.capacity:
            return False
        if len(self.ledger.leases.held.get(peer.uid, ())) >= self.max_leases:
            return False
        return self.peers.has_credit(peer, self.context.credit_bytes)

    def _load(self, peer: Peer) -> int:
        """Number of training and evaluation samples that a worker generates."""
        load = self.ledger.leases.load.get
        return load((peer.uid, False), 0) + load((peer.uid, True), 0)

    def _load_share(self, peer: Peer) -> float:
        """Number of samples that a worker generates, as a share of its capacity."""
        return self._load(peer) / peer.capacity

    def _choose(self, peer: Peer) -> Sample | None:
        assert peer.version is not None, "only a worker with weights has room"
        share_left = self._evaluation_share_left(peer)
        return choose_sample(self.context.schedule, self.ledger, peer.version, share_left)

    def _grant(self, sample: Sample, peer: Peer, ready: dict[str, Peer], now: float) -> None:
        """Lease a sample to a worker: to the one in `ready` (by uid) whose KV cache has the sample's prefix, or else to
        `peer`, for which the sample was chosen."""
        cached = ready.get(sample.cached_by(peer.step))
        if cached and cached.version == peer.version and self._has_room(cached):
            peer = cached
        self.lease(sample, peer, peer.step, now)

    def _evaluation_share_left(self, peer: Peer) -> bool:
        return self.ledger.leases.load.get((peer.uid, True), 0) < self.config.evaluation.share * peer.capacity

    def standstill(self, now: float) -> str:
        """A sentence that says that the run cannot progress any more, or "". It cannot if for `STANDSTILL_S` nothing
        was leased or evaluated, the learner has trained every batch, and a worker with the newest weights has free
        slots that the schedule leaves empty. A disconnected peer that the run waits for is no standstill."""
        ledger, peers, schedule = self.ledger, self.peers, self.context.schedule
        steps, opened = ledger.steps, ledger.account.counts[GroupState.OPEN]
        waits = (
            ledger.leases or ledger.evaluations or ledger.rounds.draining or steps.consumed < steps.next
            or (ledger.rules.scored_apart and ledger.queue.has_scoring and not peers.scorers())
            or (ledger.rules.agents and not peers.with_role("agents"))
            or not any(self._has_room(peer) and peer.step == steps.consumed for peer in peers.workers())
            or schedule.wants_prompts(ledger)
        )  # fmt: skip
        progress = ledger.serials.last_lease_id, ledger.serials.next_group, steps.next
        if waits or progress != self._progress:
            self._progress, self._progress_at = progress, now
        if now - self._progress_at < STANDSTILL_S:
            return ""
        kind = self.config.schedule.kind
        return (
            f"nothing can happen any more: for {STANDSTILL_S:g} s, key 'schedule.kind' = {kind!r} has handed out "
            f"nothing to workers with free slots, and the learner waits for batch {steps.next}; {len(ledger.ready)} "
            f"groups are complete and {opened} open; mend the schedule, and try it with `april check schedule {kind}`"
        )

    def abort(self, now: float) -> None:
        """End a round: have workers hand back every training sample in generation within `broker.abort_deadline_s`."""
        deadline = now + self.config.broker.abort_deadline_s
        aborted = [lease for lease in self.ledger.leases.values() if self.ledger.is_aborted(lease.id)]
        for lease in aborted:
            self.ledger.expire_at(lease, min(lease.expires_at, deadline))
        self.recorder.add_aborted(len(aborted))
        busy = {lease.worker for lease in aborted}
        for peer in self.peers.workers():
            if peer.uid in busy:
                self.recorder.add_span(peer.name, "abort", now, now)
        self.peers.broadcast(wire.Abort(self.ledger.rounds.number, self.ledger.rounds.watermark))

    MESSAGES = LeaseHolderHandler.MESSAGES | {
        wire.WorkerCapacity: on_worker_capacity,
        wire.WeightFolderRefused: on_weight_folder_refused,
        wire.ActivitySpan: on_activity_span,
        wire.FetchImages: send_images,
    }
