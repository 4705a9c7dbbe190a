"""The ledger: who holds each sample, what is finished and what was trained. No I/O, clocks or sockets.

    sample: waiting -> leased -> (partial -> leased ...) -> generated -> scoring -> done | dead
    or, with agents: (acting -> partial -> leased ...) -> acting -> generated ... | done | dead
    group:  open -> ready -> delivered(step) -> trained(step) | discarded(reason)

Every change is an event: a command checks its preconditions, hands an event to `write` (the journal) and applies it,
and `apply` alone changes the state, so replaying the journal into an empty ledger rebuilds it. The ledger closes:
generated = trained + delivered + ready + open + sum(discarded), in acknowledged tokens, at any moment.

    ledger = Ledger(Rules(batch_groups=32, group_size=8, max_staleness=5), write=journal.append)
    group = ledger.open_group(epoch=0, row=17, floor=0)
    lease = ledger.lease(group.samples[0], worker="w0", step=0, expires_at=now + 60)
    ledger.add_chunk(lease.id, start=0, count=40, version=Version(0, 0), payload=...)
    ledger.add_chunk(lease.id, start=40, count=9, version=Version(0, 1), finish_reason="stop", ...)
    ledger.score(lease.id, reward=1.0)
"""

from array import array
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from zlib_ng.zlib_ng import crc32

from april.broker.ledger import events
from april.broker.ledger.admission import PendingTail, Verdict, accepted_images, check_row
from april.broker.ledger.events import EventArray
from april.broker.ledger.forks import Superseded, has_known_answer
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import (
    TO_GENERATE,
    Group,
    GroupState,
    Lease,
    Sample,
    SampleState,
    needs_agent,
)
from april.broker.ledger.state import LedgerState
from april.broker.ledger.transitions import TRANSITIONS
from april.wire.message import Version
from april.wire.rows import CHUNK, ENDS_LEASE_BYTE, ROW, ReportRow, chunk_row, pack_rows, select_rows
from april.wire.work import MAX_FORKS

Write = Callable[[events.Event, Sequence[EventArray]], Any]
"""Function that writes an event and its arrays to the journal; returns the reference by which they are read back.
In the broker it is `Journal.append` (`Service.__init__`)."""
CLOCK_S = 0.05
"""Resolution of the times in the journal, seconds."""


class LedgerError(RuntimeError):
    """A command that contradicts the ledger's state; the text says how."""


class Ledger(LedgerState):
    """The ledger with its commands: each checks its preconditions, writes an event ahead and applies it."""

    def __init__(
        self,
        rules: Rules,
        write: Write = lambda event, arrays: None,
        group_scored: Callable[[bool, int, int], bool] = lambda evaluation, epoch, row: False,
    ):
        """`write`: writes an event ahead to the journal. `group_scored(evaluation, epoch, row)`: whether one verifier
        call scores all samples of that prompt."""
        super().__init__(rules)
        self.write = write
        self.clock = 0.0
        """Time of the commands that follow, Unix seconds; the broker sets it."""
        self.group_scored = group_scored
        self.keep_images: Callable[[bool, int, int], list[str]] = lambda evaluation, epoch, row: []
        self._expiries: dict[int, array[int]] = {}
        """Lease ids by second of expiry; a renewed lease keeps its old entry, and is checked again in that second."""

    def apply(self, event: events.Event, reference: Any = None) -> None:
        """Change the state by one event; `reference` is the event's reference in the journal."""
        self.observer.record(event)
        TRANSITIONS[type(event)](self, event, reference)

    def commit(self, event: events.Event, arrays: Sequence[EventArray] = ()) -> None:
        """Write an event to the journal, then apply it; a `TimePassed` goes first if the last is `CLOCK_S` s old."""
        if self.clock - self.now >= CLOCK_S and self.header:
            passed = events.TimePassed(self.clock)
            self.apply(passed, self.write(passed, ()))
        self.apply(event, self.write(event, arrays))

    def open_group(
        self, epoch: int, row: int, floor: int, evaluation: bool = False, size: int | None = None, prompt: bytes = b""
    ) -> Group:
        """Open a group of `size` samples (None: `Rules.group_size`) for the prompt at (epoch, row), of which `prompt`
        has the int32 token ids; `keep_images` puts its images on disk first. `floor`: least policy step of a worker
        that starts the group or, for evaluation, the evaluated step. Raises LedgerError if a training group would break
        the staleness bound."""
        if not evaluation and not self.bound.survives(self.steps.next, floor):
            raise LedgerError(f"opening a group at step {floor} would break the staleness bound")
        group, size = self.serials.next_group, size or self.rules.group_size
        replaces = None if evaluation else self.dead_letters.requeued_group_at(epoch, row)
        drawn = evaluation, epoch, row
        facts = self.group_scored(*drawn), self.keep_images(*drawn), self.prompt_order.number_of(*drawn)
        opened = events.GroupOpened(group, evaluation, epoch, row, size, floor, len(prompt) // 4, replaces, *facts)
        self.commit(opened, [(crc32(prompt), prompt)])
        return self.groups[group]

    def submit(self, prompt: events.PromptSubmitted, tokens: bytes | memoryview) -> Verdict:
        """Accept the trainer's next prompt, int32 token ids. A prompt sent before is a DUPLICATE, one that skips a
        number a GAP."""
        if prompt.row != self.prompts.submitted_count:
            return Verdict.DUPLICATE if prompt.row < self.prompts.submitted_count else Verdict.GAP
        self.commit(prompt, [(crc32(tokens), tokens)])
        return Verdict.OK

    def lease(self, sample: Sample, worker: str, step: int, expires_at: float, ends_at: float = float("inf")) -> Lease:
        """Lease a waiting sample to a worker at policy step `step` until `expires_at`; renewals go up to `ends_at`.

        A scoring lease on a group that is scored as a whole covers all its live samples. Raises LedgerError if the
        sample does not wait, or needs a later step or, if it is held out, another one.
        """
        scoring = sample.state is SampleState.GENERATED
        if scoring and sample.group.group_scored:
            if not sample.group.awaits_scores:
                raise LedgerError(f"group {sample.group.id} is scored together, and not all of it is generated")
            sample = sample.group.live_samples[0]
        if sample.lease_id or not (scoring or sample.state in TO_GENERATE) or sample.group.state is not GroupState.OPEN:
            raise LedgerError(f"sample {sample.group.id}.{sample.index} is not waiting")
        if not scoring and (step < sample.first_step or (sample.group.evaluation and step > sample.first_step)):
            raise LedgerError(f"sample {sample.group.id}.{sample.index} needs step {sample.first_step}, not {step}")
        lease_id = self.serials.last_lease_id + 1
        self.commit(events.Leased(lease_id, sample.group.id, sample.index, worker, step, scoring, sample.fork_number))
        lease = self.leases[lease_id]
        lease.ends_at = ends_at
        self.expire_at(lease, expires_at)
        return lease

    def lease_agent(self, sample: Sample, holder: str, expires_at: float) -> Lease:
        """Lease an agent session, which no process runs at the moment, to the agents process `holder`: that reports the
        session's observations and ends it. If a worker is generating a turn of the session, it goes on."""
        if not self.rules.agents or not needs_agent(sample):
            raise LedgerError(f"sample {sample.group.id}.{sample.index} lacks no agent")
        lease_id = MAX_FORKS * (self.serials.last_lease_id // MAX_FORKS + 1)
        self.commit(events.AgentLeased(lease_id, sample.group.id, sample.index, holder))
        lease = self.leases[lease_id]
        self.expire_at(lease, expires_at)
        return lease

    def close_agent(
        self, lease_id: int, superseded: Superseded = (), state: bytes = b"", said: events.Said | None = None
    ) -> Verdict:
        """Close a finished agent's session, which then waits for a scoring lease; the verdict is INVALID if the agent
        received no answer. `superseded`, `state`, `said`: see `events.AgentClosed`."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return Verdict.FENCED
        if not lease.agent or not has_known_answer(lease.sample, superseded):
            return Verdict.INVALID
        self.commit(events.AgentClosed(lease_id, list(superseded), state, said))
        return Verdict.OK

    def lose_session(self, sample: Sample) -> None:
        """End a sample whose agent stopped and whose session cannot be replayed: no failed attempt is counted. A group
        left with fewer live samples than it needs is discarded for the reason `not_replayed`."""
        if not self.rules.agents or not needs_agent(sample) or not sample.session_started:
            raise LedgerError(f"sample {sample.group.id}.{sample.index} has nothing that would be replayed")
        self.commit(events.SessionLost(sample.group.id, sample.index))

    def expire_at(self, lease: Lease, instant: float) -> None:
        """Set the expiry of a lease to `instant`, or to its latest end if that is earlier; infinity means never."""
        lease.expires_at = min(instant, lease.ends_at)
        if lease.expires_at < float("inf"):
            self._schedule_expiry(lease)

    def _schedule_expiry(self, lease: Lease) -> None:
        self._expiries.setdefault(int(lease.expires_at), array("Q")).append(lease.id)

    def add_chunks(
        self,
        table: bytes | memoryview,
        payload: bytes | memoryview = b"",
        holder: str | None = None,
        malformed: Container[int] = (),
        checksum: int | None = None,
        images: Mapping[int, list[str]] | None = None,
    ) -> list[Verdict]:
        """Accept the valid rows of a table as one event; returns a verdict for each row.

        A row is accepted iff its lease is current and it starts at the acknowledged length of its sample. A finish
        reason ends the response together with its last tokens: the holder scores it next, or the lease ends if scoring
        needs a lease of its own (scorers, group scoring, agents). An observation is accepted where a turn ends; it has
        no policy version. With agents, a finish reason ends a turn, and only the agent's holder adds observations: at
        the beginning, after a turn, or in a new fork that starts at the beginning or at the end of a complete turn.
        After a row that is not accepted, further rows of its lease are dropped; other leases are not affected.

        `holder`: required holder of every lease, None for any; `malformed`: indices of rows to reject whatever the
        ledger says; `checksum`: crc32 of the payload if known; `images`: names of kept images by index of their row.
        """
        verdicts, ending, pending = [], [], dict[int, PendingTail]()
        leases, max_tokens, evaluating = self.leases, self.rules.max_response_tokens, bool(self.evaluations)
        frontier, newest = self.steps.frontier, max(0, self.learner.incarnation)
        for index, row in enumerate(ROW.iter_unpack(table)):
            lease_id, _, start, tokens, incarnation, step, _, _, kind, finish, _, _, _ = row
            lease = leases.get(lease_id) or leases.find(lease_id)
            if lease is None or (holder is not None and lease.worker != holder):
                verdicts.append(Verdict.FENCED)
                continue
            length, floor, _, generating = pending.get(lease_id) or (
                lease.sample.length, lease.floor, False, lease.generating,
            )  # fmt: skip
            is_plain = (
                start == length and generating and kind == CHUNK and floor <= step <= frontier
                and incarnation <= newest and start < start + tokens < max_tokens and index not in malformed
                and not (evaluating and lease.sample.group.evaluation)
            )  # fmt: skip
            if is_plain:
                verdict, pending[lease_id] = Verdict.OK, (start + tokens, step, True, not finish)
            else:
                verdict = check_row(self, lease, ReportRow(*row), pending, index in malformed)
            if finish and verdict is Verdict.OK and self.ends_with_generation(lease.sample.group):
                ending.append(index)
            verdicts.append(verdict)
        accepted: bytes | bytearray | memoryview = table
        if ending:
            accepted = marked = bytearray(table)
            for index in ending:
                marked[index * ROW.size + ENDS_LEASE_BYTE] = 1
        if verdicts.count(Verdict.OK) < len(verdicts):
            accepted, payload = select_rows(accepted, payload, [verdict is Verdict.OK for verdict in verdicts])
            checksum = None
        if accepted:
            event = events.RowsAccepted(bytes(accepted), len(payload), accepted_images(table, images or {}, verdicts))
            self.commit(event, [(crc32(payload) if checksum is None else checksum, payload)])
        return verdicts

    def add_chunk(
        self, lease_id: int, start: int, count: int, version: Version, finish_reason: str = "", payload: bytes = b""
    ) -> Verdict:
        """Accept `count` new tokens from offset `start` of the response on. `finish_reason`: "" while the response goes
        on; `payload`: ids and log-probabilities of the tokens, as in `wire.rows`."""
        row = chunk_row(lease_id, start, count, version, finish_reason, payload)
        return self.add_chunks(pack_rows([row]), payload)[0]

    def score(
        self, lease_id: int, reward: float, details: dict[str, float] | None = None, superseded: Superseded = ()
    ) -> Verdict:
        """Score the sample of a lease, or a session under the lease of its agents process. A reward that the agent has
        set before is kept. `superseded`: see `events.AgentClosed`."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return Verdict.FENCED
        if lease.generating:
            return Verdict.GAP
        needs_group = lease.for_group or (lease.agent and lease.sample.group.group_scored)
        if needs_group or (lease.agent and not has_known_answer(lease.sample, superseded)):
            return Verdict.INVALID
        if lease.sample.reward is not None:
            reward, details = lease.sample.reward, lease.sample.details
        self.commit(events.SampleScored(lease_id, reward, details or {}, list(superseded) if lease.agent else []))
        return Verdict.OK

    def score_group(self, lease_id: int, rewards: list[float], details: list[dict[str, float]]) -> Verdict:
        """Score all samples that a lease on a whole group covers, in the order of the samples."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return Verdict.FENCED
        if not lease.for_group or not len(lease.samples) == len(rewards) == len(details):
            return Verdict.INVALID
        self.commit(events.GroupScored(lease_id, rewards, details))
        return Verdict.OK

    def end_lease(self, lease_id: int, cause: str, error: str = "", at: float = 0.0) -> Verdict:
        """End a lease for the `cause` (see `events.LeaseEnded`) at the time `at` (Unix seconds, 0: unknown): its sample
        waits again or, after too many failures, dies, which may end its group."""
        if lease_id not in self.leases:
            return Verdict.FENCED
        self.commit(events.LeaseEnded(lease_id, cause, error, at))
        return Verdict.OK

    def renew(self, lease_ids: list[int], expires_at: float) -> list[int]:
        """Extend leases to `expires_at`, but none beyond its latest end, and none whose sample must be handed back
        (`is_aborted`); returns the ids that are not of current leases."""
        for lease_id in lease_ids:
            if lease_id in self.leases and not self.is_aborted(lease_id):
                self.leases[lease_id].expires_at = min(expires_at, self.leases[lease_id].ends_at)
        return [lease_id for lease_id in lease_ids if lease_id not in self.leases]

    def expire(self, now: float) -> list[Lease]:
        """End the leases that have expired, and return them."""
        expired = {}
        for second in [second for second in self._expiries if second <= now]:
            for lease in filter(None, map(self.leases.get, self._expiries.pop(second))):
                if lease.expires_at <= now:
                    expired[lease.id] = lease
                else:
                    self._schedule_expiry(lease)
        for lease in expired.values():
            if self.is_aborted(lease.id):
                self.end_lease(lease.id, "abort", at=now)
            else:
                why = "was held for longer than broker.max_run_s" if lease.ends_at <= now else "was not renewed"
                self.end_lease(lease.id, "expired", f"the lease {why}", at=now)
        return list(expired.values())

    def discard(self, group: Group, reason: str) -> None:
        """Discard a group for `reason`; its leases are revoked, and a batch that contains the group loses it."""
        self.commit(events.GroupDiscarded(group.id, reason))

    def filter_ready(self, reason_against: Callable[[Group], str]) -> None:
        """Filter complete groups: discard each for which `reason_against` returns a reason, "" for none.

        Each group is judged once before a batch can take it, and again after a restart.
        """
        while self.unfiltered:
            group = self.unfiltered[0]
            if group.state is GroupState.READY and (reason := reason_against(group)):
                self.discard(group, reason)
            del self.unfiltered[0]

    def requeue(self, group: int) -> Verdict:
        """Have the prompt of `group`, which was discarded because a sample died, drawn again before fresh prompts. A
        group's prompt is drawn again once at most."""
        letter = self.dead_letters.find(group)
        if letter is None or letter.outcome == "without_it":
            return Verdict.INVALID
        if letter.outcome != "discarded":
            return Verdict.DUPLICATE
        self.commit(events.GroupRequeued(group))
        return Verdict.OK

    def record_evaluation(self, step: int, result: dict[str, Any]) -> None:
        """Store the result of a complete evaluation, and forget its groups."""
        self.commit(events.EvaluationRecorded(step, result))

    def restart_evaluation(self, step: int) -> None:
        """Drop the evaluation of policy step `step`, which can be opened again."""
        self.commit(events.EvaluationRestarted(step))

    def start_drain(self) -> None:
        """Start a drain: grant no lease, and have workers hand back training samples in generation. Idempotent."""
        if not self.rounds.draining:
            self.commit(events.DrainStarted(self.serials.last_lease_id))

    def end_drain(self) -> None:
        if self.rounds.draining:
            self.commit(events.DrainEnded())

    def start_round(self) -> None:
        self.commit(events.RoundStarted(self.rounds.number + 1))

    def end_round(self) -> int:
        """End the round; returns the watermark, the lease id up to which workers have to hand back training samples."""
        self.commit(events.RoundEnded(self.rounds.number, self.serials.last_lease_id))
        return self.rounds.watermark

    def choose_batch(self, groups: int) -> list[Group] | None:
        """Choose the `groups` oldest complete groups; None if too few exist or the staleness bound forbids delivery."""
        if len(self.ready) < groups or not groups:
            return None
        if not self.bound.survives_delivery(self.steps.next, self.ready.ages_of_oldest(groups)):
            return None
        return sorted(self.ready.oldest(groups), key=lambda group: group.id)

    def deliver(self, groups: list[Group]) -> int:
        """Make groups the next batch, irrevocably; returns its number. Raises LedgerError if `batch_fault` objects."""
        if fault := self.batch_fault(groups):
            raise LedgerError(f"batch {self.steps.next} {fault}")
        self.commit(events.BatchDelivered(step := self.steps.next, [group.id for group in groups]))
        return step

    def consume(self, step: int, discarded: str = "") -> Verdict:
        """Record that the learner has trained batch `step`, or skipped it for the reason `discarded`."""
        if step < self.steps.consumed:
            return Verdict.DUPLICATE
        if step != self.steps.consumed or step not in self.deliveries:
            return Verdict.INVALID
        self.commit(events.BatchConsumed(step, discarded))
        return Verdict.OK

    def checkpoint(self, step: int, oldest: int) -> Verdict:
        """Record that a checkpoint with all batches before `step` is on disk, and none older than `oldest` is kept."""
        if step > self.steps.consumed:
            return Verdict.INVALID
        if step < self.steps.durable or (step == self.steps.durable and min(oldest, step) <= self.first_kept_step):
            return Verdict.DUPLICATE
        self.commit(events.CheckpointDurable(step, min(oldest, step)))
        return Verdict.OK

    def start_learner(self, step: int, uid: str = "", weights_address: str = "", weights_key: str = "") -> None:
        """Start a learner from checkpoint `step` as a new incarnation; batches from `step` on are delivered again.

        The checkpoint may contain delivered batches that the learner had not reported yet; they are consumed now.
        Raises LedgerError for a checkpoint that is not of this run. `uid`: that of its process; `weights_address`,
        `weights_key`: address and CURVE public key at which it publishes weights.
        """
        if not self.first_kept_step <= step <= self.steps.next:
            raise LedgerError(
                f"the learner starts from checkpoint {step}, but this run can go on from {self.first_kept_step} "
                f"to {self.steps.next}; give it a checkpoint of this run"
            )
        while self.steps.consumed < step:
            self.commit(events.BatchConsumed(self.steps.consumed))
        self.commit(events.LearnerStarted(self.learner.incarnation + 1, step, uid, weights_address, weights_key))
