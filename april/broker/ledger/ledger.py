"""Who owns each sample, what is finished, what was trained: a state machine without I/O, clocks or sockets.

    sample: waiting -> leased -> (partial -> leased ...) -> generated -> scoring -> done | dead
    or, with agents: (acting -> partial -> leased ...) -> acting -> generated ... | done | dead
    group:  open -> ready -> delivered(step) -> trained(step) | discarded(reason)

Every change is an event: a command checks itself, hands the event to `write` (the journal) and applies it, and
`apply` alone changes the state, so replaying the journal into an empty ledger rebuilds it. The ledger closes:
generated = trained + delivered + ready + open + sum(discarded), in acknowledged tokens, at any moment.

    ledger = Ledger(Rules(batch_groups=32, group_size=8, max_staleness=5), write=journal.append)
    group = ledger.open_group(epoch=0, row=17, floor=0)
    lease = ledger.lease(group.samples[0], worker="w0", step=0, expires_at=now + 60)
    ledger.add_chunk(lease.id, start=0, count=40, version=Version(0, 0), payload=...)
    ledger.add_chunk(lease.id, start=40, count=9, version=Version(0, 1), finish_reason="stop", ...)
    ledger.score(lease.id, reward=1.0)
"""

from array import array
from collections.abc import Callable, Container, Sequence
from typing import Any

from zlib_ng.zlib_ng import crc32

from april.broker.ledger import events
from april.broker.ledger.admission import Ahead, Verdict, check_row
from april.broker.ledger.branches import Superseded, was_heard
from april.broker.ledger.events import Part
from april.broker.ledger.prompts import Prompts
from april.broker.ledger.rules import Rules
from april.broker.ledger.samples import TO_GENERATE, Group, GroupState, Lease, Sample, SampleState, lacks_agent
from april.broker.ledger.state import LedgerState
from april.wire.agents import BRANCHES
from april.wire.rows import CHUNK, OVER, ROW, chunk_row, pack_rows, select_rows
from april.wire.version import Version

Write = Callable[[events.Event, Sequence[Part]], Any]
"""writes an event and its arrays down; what it gives is kept as the reference to them"""


class LedgerError(RuntimeError):
    """A request that contradicts the ledger; the text says how."""


class Ledger(LedgerState):
    def __init__(
        self,
        rules: Rules,
        write: Write = lambda event, arrays: None,
        together: Callable[[bool, int, int], bool] = lambda evaluation, epoch, row: False,
    ):
        """`together`: whether the samples of a prompt are scored together, asked when its group is opened."""
        super().__init__(rules)
        self.write = write
        self.together = together
        self._expiries: dict[int, array[int]] = {}
        """ids of leases by the second in which to look at them; renewals make a lease outlive some of its entries"""

    # --- commands -------------------------------------------------------------------------------------------

    def commit(self, event: events.Event, arrays: Sequence[Part] = ()) -> None:
        self.apply(event, self.write(event, arrays))

    def open_group(
        self, epoch: int, row: int, floor: int, evaluation: bool = False, size: int | None = None, prompt: bytes = b""
    ) -> Group:
        """Draw a prompt, int32 token ids. `floor`: workers must be at this step or later to start it.

        Evaluation groups take no part in bound and batches; their `floor` is the policy step they are for.
        """
        if not evaluation and not self.bound.survives(self.next_step, floor):
            raise LedgerError(f"opening a group at step {floor} would break the staleness bound")
        group, size = self._next_group, size or self.rules.group_size
        replaces = None if evaluation else self.dead_letters.waiting_at(epoch, row)
        together = self.together(evaluation, epoch, row)
        opened = events.GroupOpened(group, evaluation, epoch, row, size, floor, len(prompt) // 4, replaces, together)
        self.commit(opened, [(crc32(prompt), prompt)])
        return self.groups[group]

    def submit(self, prompt: events.PromptSubmitted, tokens: bytes | memoryview) -> Verdict:
        """Take the next prompt that the trainer brings, int32 token ids; one that it has brought before is known."""
        if prompt.row != self.prompts_submitted:
            return Verdict.DUPLICATE if prompt.row < self.prompts_submitted else Verdict.GAP
        self.commit(prompt, [(crc32(tokens), tokens)])
        return Verdict.OK

    def next_prompt(self, prompts: Prompts) -> tuple[int, int, bytes] | None:
        """(epoch, row, token ids) of the prompt for the next group: that of a re-queued group, otherwise the one at
        the cursor; None when they are exhausted. A prompt that is no longer in the dataset's limits goes on waiting."""
        for place in self.dead_letters.waiting.values():
            drawn = prompts.draw(place)
            if drawn and drawn[:2] == place:
                return drawn
        return prompts.draw(self.cursor)

    def lease(self, sample: Sample, worker: str, step: int, expires_at: float, ends_at: float = float("inf")) -> Lease:
        """Give a sample that waits to a worker at policy step `step`; no renewal keeps it longer than `ends_at`.

        Where a group is scored together, the lease for its scores is on all of its samples that live.
        """
        scoring = sample.state is SampleState.GENERATED
        if scoring and sample.group.together:
            if not sample.group.awaits_scores:
                raise LedgerError(f"group {sample.group.id} is scored together, and not all of it is generated")
            sample = sample.group.live_samples[0]
        if sample.lease_id or not (scoring or sample.state in TO_GENERATE) or sample.group.state is not GroupState.OPEN:
            raise LedgerError(f"sample {sample.group.id}.{sample.index} is not waiting")
        if not scoring and step < sample.first_step:
            raise LedgerError(f"sample {sample.group.id}.{sample.index} needs step {sample.first_step}, not {step}")
        lease_id = self.last_lease_id + 1
        self.commit(events.Leased(lease_id, sample.group.id, sample.index, worker, step, scoring, sample.branch))
        lease = self.leases[lease_id]
        lease.ends_at = ends_at
        self.expire_at(lease, expires_at)
        return lease

    def lease_agent(self, sample: Sample, holder: str, expires_at: float) -> Lease:
        """Give a sample whose agent nobody runs to an agents process: it says what the policy is told and, in the end,
        what that was worth. A turn that is under way goes on meanwhile."""
        if not self.rules.agents or not lacks_agent(sample):
            raise LedgerError(f"sample {sample.group.id}.{sample.index} lacks no agent")
        lease_id = BRANCHES * (self.last_lease_id // BRANCHES + 1)
        self.commit(events.AgentLeased(lease_id, sample.group.id, sample.index, holder))
        lease = self.leases[lease_id]
        self.expire_at(lease, expires_at)
        return lease

    def close_agent(self, lease_id: int, superseded: Superseded = (), state: bytes = b"") -> Verdict:
        """Its agent has nothing more to say; a verifier says what it was worth. Without a turn there is nothing to.

        `superseded`: (branch, length) where an earlier execution of the agent has gone further than the last one;
        `state`: what the verifier is given of the agent.
        """
        lease = self.leases.get(lease_id)
        if lease is None:
            return Verdict.FENCED
        if not lease.agent or not was_heard(lease.sample, superseded):
            return Verdict.INVALID
        self.commit(events.AgentClosed(lease_id, list(superseded), state))
        return Verdict.OK

    def lose_session(self, sample: Sample) -> None:
        """End a sample whose agent nobody runs, and which would ask again what it has asked already. Nobody's failure:
        no attempt and no dead letter; a group that it leaves too small is discarded as `not_replayed`."""
        if not self.rules.agents or not lacks_agent(sample) or not sample.was_spoken_in:
            raise LedgerError(f"sample {sample.group.id}.{sample.index} has nothing that would be replayed")
        self.commit(events.SessionLost(sample.group.id, sample.index))

    def expire_at(self, lease: Lease, instant: float) -> None:
        """Let a lease end at `instant`, unless it is renewed, or at its end if that is earlier; infinite is never."""
        lease.expires_at = min(instant, lease.ends_at)
        if lease.expires_at < float("inf"):
            self._look_at(lease)

    def _look_at(self, lease: Lease) -> None:
        self._expiries.setdefault(int(lease.expires_at), array("Q")).append(lease.id)

    def add_chunks(
        self,
        table: bytes | memoryview,
        payload: bytes | memoryview = b"",
        holder: str | None = None,
        wrong: Container[int] = (),
        checksum: int | None = None,
    ) -> list[Verdict]:
        """Accept those rows of a table that may be, as one fact; what is wrong with one costs no other its place.

        Tokens are accepted iff their lease is current and they start at the acknowledged length. A finish reason ends
        the response together with its last tokens; the holder scores it next, unless it is scored apart or with its
        group: then it ends the lease as well. What the environment has answered to the turn that ends at `start` is
        accepted as a chunk is; its version is nobody's. With agents, an ending is that of a turn, and the holder of the
        agent alone may say what follows it, also at the beginning. It may say something else as well, in a further
        branch of the session, which leaves another behind a turn that is over, or at the beginning. Behind a row that
        is not in its place, or may not be, further rows of its lease are dropped.

        `holder`: of all leases, None: whoever it is; `wrong`: places of rows that cannot be taken whatever the ledger
        says; `checksum`: crc32 of the payload where it is known.
        """
        verdicts, ending, ahead = [], [], dict[int, Ahead]()
        leases, most = self.leases, self.rules.max_response_tokens
        frontier, branch_now = self.frontier, max(0, self.branch)
        for place, row in enumerate(ROW.iter_unpack(table)):
            lease_id, _, start, count, branch, step, _, _, kind, finish, _, _, _ = row
            lease = leases.get(lease_id) or self.lease_of(lease_id)
            if lease is None or (holder is not None and lease.worker != holder):
                verdicts.append(Verdict.FENCED)
                continue
            length, floor, _, generating = ahead.get(lease_id) or (
                lease.sample.length, lease.floor, False, lease.generating,
            )  # fmt: skip
            is_plain = (
                start == length and generating and kind == CHUNK and floor <= step <= frontier
                and branch <= branch_now and start < start + count < most and place not in wrong
            )  # fmt: skip
            if is_plain:
                verdict, ahead[lease_id] = Verdict.OK, (start + count, step, True, not finish)
            else:
                verdict = check_row(self, lease, row, ahead, place in wrong)
            if finish and verdict is Verdict.OK and self.is_handed_over(lease.sample.group):
                ending.append(place)
            verdicts.append(verdict)
        accepted: bytes | bytearray | memoryview = table
        if ending:
            accepted = marked = bytearray(table)
            for place in ending:
                marked[place * ROW.size + OVER] = 1
        if verdicts.count(Verdict.OK) < len(verdicts):
            accepted, payload = select_rows(accepted, payload, [verdict is Verdict.OK for verdict in verdicts])
            checksum = None
        if accepted:
            event = events.RowsAccepted(bytes(accepted), len(payload))
            self.commit(event, [(crc32(payload) if checksum is None else checksum, payload)])
        return verdicts

    def add_chunk(
        self, lease_id: int, start: int, count: int, version: Version, finish_reason: str = "", payload: bytes = b""
    ) -> Verdict:
        """A table of one row, of tokens that have just been sampled."""
        return self.add_chunks(
            pack_rows([chunk_row(lease_id, start, count, version, finish_reason, payload)]), payload
        )[0]

    def score(
        self,
        lease_id: int,
        reward: float,
        details: dict[str, float] | None = None,
        superseded: Superseded = (),
    ) -> Verdict:
        """`superseded` of a session, as in `close_agent`."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return Verdict.FENCED
        if lease.generating:
            return Verdict.GAP
        together = lease.agent and lease.sample.group.together
        if lease.on_group or together or (lease.agent and not was_heard(lease.sample, superseded)):
            return Verdict.INVALID
        self.commit(events.SampleScored(lease_id, reward, details or {}, list(superseded) if lease.agent else []))
        return Verdict.OK

    def score_group(self, lease_id: int, rewards: list[float], details: list[dict[str, float]]) -> Verdict:
        """Those of all samples that a lease on a group is on, in their order."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return Verdict.FENCED
        if not lease.on_group or not len(lease.samples) == len(rewards) == len(details):
            return Verdict.INVALID
        self.commit(events.GroupScored(lease_id, rewards, details))
        return Verdict.OK

    def end_lease(self, lease_id: int, cause: str, error: str = "", at: float = 0.0) -> Verdict:
        """The sample goes back to where it waits; too many failures make it dead, and perhaps its group."""
        if lease_id not in self.leases:
            return Verdict.FENCED
        self.commit(events.LeaseEnded(lease_id, cause, error, at))
        return Verdict.OK

    def renew(self, tokens: list[int], expires_at: float) -> list[int]:
        """Prolong leases, each to its end at most and aborted ones not at all; returns those that are not
        current any more."""
        for lease_id in tokens:
            if lease_id in self.leases and not self.is_aborted(lease_id):
                self.leases[lease_id].expires_at = min(expires_at, self.leases[lease_id].ends_at)
        return [lease_id for lease_id in tokens if lease_id not in self.leases]

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose time is over."""
        expired = {}
        for second in [second for second in self._expiries if second <= now]:
            for lease in filter(None, map(self.leases.get, self._expiries.pop(second))):
                if lease.expires_at <= now:
                    expired[lease.id] = lease
                else:
                    self._look_at(lease)
        for lease in expired.values():
            if self.is_aborted(lease.id):
                self.end_lease(lease.id, "abort", at=now)
            else:
                why = "was held for longer than broker.max_run_s" if lease.ends_at <= now else "was not renewed"
                self.end_lease(lease.id, "expired", f"the lease {why}", at=now)
        return list(expired.values())

    def discard(self, group: Group, reason: str) -> None:
        """End a group that is not trained for a reason that is counted; its leases are void, its batch goes without."""
        self.commit(events.GroupDiscarded(group.id, reason))

    def filter_ready(self, reason_against: Callable[[Group], str]) -> None:
        """Discard those of the complete groups against which there is a reason; each is asked about once, before a
        batch can take it, and again after a restart."""
        while self.unjudged:
            group = self.unjudged[0]
            if group.state is GroupState.READY and (reason := reason_against(group)):
                self.discard(group, reason)
            del self.unjudged[0]

    def requeue(self, group: int) -> Verdict:
        """Draw the prompt of a group that lost a sample for good again, ahead of fresh ones; once for each group."""
        letter = self.dead_letters.of_group(group)
        if letter is None or letter.outcome == "without_it":
            return Verdict.INVALID
        if letter.outcome != "discarded":
            return Verdict.DUPLICATE
        self.commit(events.GroupRequeued(group))
        return Verdict.OK

    def record_evaluation(self, step: int, result: dict[str, Any]) -> None:
        """Keep of a complete evaluation what it showed, and forget its groups."""
        self.commit(events.EvaluationRecorded(step, result))

    def start_drain(self) -> None:
        """Have all that is generated for training handed back. Saying so again changes nothing."""
        if not self.draining:
            self.commit(events.DrainStarted(self.last_lease_id))

    def end_drain(self) -> None:
        if self.draining:
            self.commit(events.DrainEnded())

    def start_round(self) -> None:
        self.commit(events.RoundStarted(self.round + 1))

    def end_round(self) -> int:
        """Grants up to the returned watermark are to be handed back."""
        self.commit(events.RoundEnded(self.round, self.last_lease_id))
        return self.watermark

    def choose_batch(self, groups: int) -> list[Group] | None:
        """`groups` complete groups, those that are due first; None if there are too few or the bound forbids it."""
        if len(self.ready) < groups or not groups:
            return None
        if not self.bound.survives_delivery(self.next_step, self.ready.ages_of_oldest(groups)):
            return None
        return sorted(self.ready.oldest(groups), key=lambda group: group.id)

    def deliver(self, groups: list[Group]) -> int:
        """Fix the next batch for good; returns its step."""
        step = self.next_step
        self.commit(events.BatchDelivered(step, [group.id for group in groups]))
        return step

    def consume(self, step: int, discarded: str = "") -> Verdict:
        """The learner's weights contain batch `step`, or are past it without it, for a reason that is counted."""
        if step < self.consumed:
            return Verdict.DUPLICATE
        if step != self.consumed or step not in self.deliveries:
            return Verdict.INVALID
        self.commit(events.BatchConsumed(step, discarded))
        return Verdict.OK

    def checkpoint(self, step: int, oldest: int) -> Verdict:
        """A checkpoint that contains all batches below `step` is on disk, and none older than `oldest` is kept."""
        if step > self.consumed:
            return Verdict.INVALID
        if step < self.durable or (step == self.durable and min(oldest, step) <= self.first_kept_step):
            return Verdict.DUPLICATE
        self.commit(events.CheckpointDurable(step, min(oldest, step)))
        return Verdict.OK

    def start_learner(self, step: int, uid: str = "", weights_address: str = "", weights_key: str = "") -> None:
        """A learner goes on from checkpoint `step`: later groups are delivered again, under a new branch.

        A checkpoint may be ahead of the last report by the batches that were delivered; they are consumed, then.
        """
        if not self.first_kept_step <= step <= self.next_step:
            raise LedgerError(
                f"the learner starts from checkpoint {step}, but this run can go on from {self.first_kept_step} "
                f"to {self.next_step}; give it a checkpoint of this run"
            )
        while self.consumed < step:
            self.commit(events.BatchConsumed(self.consumed))
        self.commit(events.LearnerStarted(self.branch + 1, step, uid, weights_address, weights_key))

    # --- questions ------------------------------------------------------------------------------------------

    def is_handed_over(self, group: Group) -> bool:
        """Whether the lease that generates a response of the group ends with it."""
        return self.rules.scored_apart or self.rules.agents or group.together

    def is_aborted(self, lease_id: int) -> bool:
        """Whether the sample is to be handed back: generated for training under a grant of an ended round,
        or of the time before a drain."""
        lease = self.leases.get(lease_id)
        return bool(lease and lease_id <= self.watermark and lease.generating and not lease.sample.group.evaluation)

    def open_groups(self) -> list[Group]:
        """Training groups that are not complete."""
        return [group for group in self.groups.values() if group.state is GroupState.OPEN and not group.evaluation]
