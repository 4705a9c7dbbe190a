"""The state of the ledger: its parts, and the changes of groups and samples that keep the parts consistent.

The parts that are `msgspec.Struct`s are stored in snapshots as they are; the others are derived or refer to groups.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from april.broker.ledger import events
from april.broker.ledger.batches import LengthCohorts, ReadyGroups, StalenessBound
from april.broker.ledger.dead_letters import DeadLetterQueue
from april.broker.ledger.forks import turn_ends_by_fork
from april.broker.ledger.leases import LeaseBook, OpenSamples
from april.broker.ledger.prompt_cursor import PromptCursor
from april.broker.ledger.queues import HandOutQueue
from april.broker.ledger.row_tallies import PromptOrder, RowTallies
from april.broker.ledger.rules import Prompts, Rules
from april.broker.ledger.samples import (
    TO_GENERATE,
    AgentSample,
    Group,
    GroupState,
    Sample,
    SampleState,
    needs_agent,
)
from april.wire.message import Version
from april.wire.training import WeightFolder

DEAD_SAMPLE = "dead_sample"
"""Discard reason of a group that has lost too many samples, and of the tokens of dead samples."""

# --- parts ------------------------------------------------------------------------------------------------------------


class Account(msgspec.Struct):
    """Token account: each acknowledged token is counted under exactly one state or discard reason. The account is
    closed (balances) if no token is missing."""

    tokens: Counter[str] = msgspec.field(default_factory=Counter)
    """Acknowledged tokens by name: generated, evaluation, and the group states other than discarded."""
    discarded: Counter[str] = msgspec.field(default_factory=Counter)
    """Acknowledged tokens of discarded groups and of discarded parts of samples, by reason."""
    counts: Counter[str] = msgspec.field(default_factory=Counter)
    """Number of training groups by state, and of discarded ones also by reason."""
    resumed: Counter[str] = msgspec.field(default_factory=Counter)
    """Tokens of partial responses leased again: `cached` to a worker with their KV cache, `moved` to another."""

    def move(self, group: Group, state: GroupState) -> None:
        """Move a training group and its tokens to another state."""
        self.counts[group.state] -= 1
        self.counts[state] += 1
        if group.state is not GroupState.DISCARDED:
            self.tokens[group.state] -= group.tokens
        if state is not GroupState.DISCARDED:
            self.tokens[state] += group.tokens
        group.state = state

    def count_discarded(self, group: Group, reason: str, times: int = 1) -> None:
        """Count a discarded group and its tokens under its reason; `times` is 1, or -1 to undo the count."""
        self.discarded[reason] += times * group.tokens
        self.counts[reason] += times

    @property
    def undelivered(self) -> int:
        """Number of training groups that are open or ready."""
        return self.counts[GroupState.OPEN] + self.counts[GroupState.READY]

    def summary(self) -> dict[str, Any]:
        """The token account as in summary.json: acknowledged tokens by state and by discard reason."""
        names = ("generated", "trained", "delivered", "ready", "open")
        return {name: self.tokens[name] for name in names} | {
            "discarded": dict(self.discarded),
            "evaluation": self.tokens["evaluation"],
        }

    @property
    def closed(self) -> bool:
        """Whether the generated tokens equal the sum of trained, delivered, ready, open and discarded ones."""
        parts = sum(self.tokens[name] for name in ("trained", "delivered", "ready", "open"))
        return self.tokens["generated"] == parts + sum(self.discarded.values())


class Serials(msgspec.Struct):
    """Numbers that are given out once and never again."""

    starts: int = 0
    """Number of starts of the broker in this run."""
    last_lease_id: int = 0
    """Largest lease id granted so far."""
    next_group: int = 0
    next_ordinal: int = 0
    """Number of training groups created so far, which is the `ordinal` of the next one."""


class StepProgress(msgspec.Struct):
    """Numbers of batches delivered, consumed and checkpointed."""

    next: int = 0
    """Number of the next batch to deliver."""
    consumed: int = 0
    """Number of batches that the learner's current weights contain."""
    frontier: int = 0
    """Largest value that `consumed` has had in this run."""
    durable: int = 0
    """Number of batches that the newest checkpoint on disk contains."""


class CurrentLearner(msgspec.Struct):
    """The learner of the current incarnation."""

    incarnation: int = -1
    """Number of the learner's start, from 0; -1 before the first. It distinguishes weights of equal step."""
    uid: str = ""
    """Process uid of the learner."""
    weights_address: str = ""
    weights_key: str = ""
    weight_folders: list[WeightFolder] = []
    """The newest snapshots of weights that the learner has written, the newest first. `weights_address`, `weights_key`:
    address and CURVE public key at which it publishes weights."""


class Rounds(msgspec.Struct):
    """State of rounds and drains. The end of a round and the start of a drain abort generation: workers have to hand
    back the training samples that they generate."""

    number: int = -1
    """Number of the current or last round, in which the samples of a batch are generated; -1 before the first."""
    open: bool = False
    draining: bool = False
    """Whether a drain is on: no lease is granted, and workers hand back the training samples that they generate."""
    watermark: int = 0
    """Lease id up to which workers have to hand back training samples."""


class Observer(Protocol):
    """A component outside the ledger that follows its changes."""

    def record(self, event: events.Event) -> None:
        """Called with each event before it is applied."""

    def record_discard(self, samples: Sequence[Sample], reason: str, kept: int) -> None:
        """Called before tokens of samples of one training group are discarded, while the samples still have them;
        `reason`: discard reason; `kept`: number of leading tokens of each sample that are kept."""


class NoObserver:
    """Observer that ignores all events."""

    def record(self, event: events.Event) -> None:
        pass

    def record_discard(self, samples: Sequence[Sample], reason: str, kept: int) -> None:
        pass


# --- the whole --------------------------------------------------------------------------------------------------------


class LedgerState:
    """The whole state of the ledger; events change it in `transitions`, commands are in `Ledger`."""

    def __init__(self, rules: Rules):
        self.rules = rules
        self.observer: Observer = NoObserver()
        self.header: events.RunStarted | None = None
        self.now = 0.0
        """Time of the newest TimePassed event, Unix seconds."""
        self.account, self.serials, self.prompts = Account(), Serials(), PromptCursor()
        self.steps, self.learner, self.rounds = StepProgress(), CurrentLearner(), Rounds()
        self.dead_letters, self.tallies, self.prompt_order = DeadLetterQueue(), RowTallies(), PromptOrder()
        self.cohorts = LengthCohorts(rules.batch_groups)
        self.evaluated: dict[int, dict[str, Any]] = {}
        """Results of complete evaluations, by policy step."""
        self.groups: dict[int, Group] = {}
        """Groups that may still change, by id: open, ready, delivered, and trained ones that a learner may go back
        to."""
        self.ready = ReadyGroups()
        """Complete groups waiting for a batch."""
        self.unfiltered: list[Group] = []
        """Complete groups that the filters have not judged yet; empty without filters."""
        self.deliveries: dict[int, list[Group]] = {}
        """Groups of the batches that a learner may still have to train, by step."""
        self.recorded: dict[int, Any] = {}
        """Journal references of the lines of metrics.jsonl, by step, for the steps in `deliveries`."""
        self.evaluations: dict[int, list[Group]] = {}
        """Groups of the evaluations in progress, by evaluated policy step."""
        self.evaluated_versions: dict[int, Version] = {}
        """Version that the first token of an evaluation in progress was sampled under, by policy step."""
        self.leases = LeaseBook()
        self.bound = StalenessBound(rules.max_staleness, rules.batch_groups)
        self.open_samples = OpenSamples()
        self.queue = HandOutQueue()

    @property
    def first_kept_step(self) -> int:
        """Step of the oldest batch whose groups are still in the ledger."""
        return min(self.deliveries, default=self.steps.consumed)

    @property
    def lost_batch(self) -> int | None:
        """Number of the first untrained batch that has lost all its groups, so that the run cannot go on; None without
        one."""
        steps = range(self.steps.consumed, self.steps.next)
        return next((step for step in steps if not self.deliveries[step]), None)

    @property
    def unrecorded_steps(self) -> list[int]:
        """Steps of consumed batches for which the journal has no line of metrics.jsonl, as a broker died before it
        wrote one."""
        return [step for step in self.deliveries if step < self.steps.consumed and step not in self.recorded]

    def was_published(self, step: int, incarnation: int) -> bool:
        """Whether a learner can have published this version: its step is at most the frontier (the newest step that a
        learner has consumed), its incarnation at most that of the current learner, or 0 before the first learner."""
        return step <= self.steps.frontier and incarnation <= max(0, self.learner.incarnation)

    def may_evaluate(self, version: Version) -> bool:
        """Whether tokens of `version` count in the evaluation of its step. The evaluation is of one version, that of
        its first token; before that token any version of the step counts."""
        return self.evaluated_versions.get(version.step, version) == version

    @property
    def held_out_waits(self) -> bool:
        """Whether a held-out sample waits for a worker."""
        return any(self.open_samples.count(state, evaluation=True) for state in TO_GENERATE)

    def ends_with_generation(self, group: Group) -> bool:
        """Whether a generation lease ends with its response in this group, so that scoring takes another lease."""
        return self.rules.scored_apart or self.rules.agents or group.group_scored

    def is_aborted(self, lease_id: int) -> bool:
        """Whether the lease's sample is to be handed back: a training sample leased before a round's end or a drain."""
        lease = self.leases.get(lease_id)
        if lease is None or lease_id > self.rounds.watermark:
            return False
        return lease.generating and not lease.sample.group.evaluation

    def batch_fault(self, groups: Sequence[Group]) -> str:
        """Reason why groups cannot be the next batch, as the rest of a sentence; empty if they can."""
        most, step, ids = self.rules.batch_groups, self.steps.next, {group.id for group in groups}
        if not 0 < len(ids) == len(groups) <= most:
            return f"has {len(groups)} groups, and a batch has 1 to {most} different ones"
        if any(group not in self.ready for group in groups):
            return "has groups that are not complete, or are in a batch before it"
        if self.bound.survives_delivery(step, Counter(group.opened_at for group in groups)):
            return ""
        others = next((f"group {group.id}" for group in self.ready.oldest(most) if group.id not in ids), "open groups")
        return f"leaves out {others}, and no batch after it could take that within {self.rules.max_staleness} steps"

    def open_groups(self) -> list[Group]:
        """The training groups that are not complete yet."""
        return [group for group in self.groups.values() if group.state is GroupState.OPEN and not group.evaluation]

    def next_prompt(self, prompts: Prompts) -> tuple[int, int, bytes] | None:
        """(epoch, row, token ids) for the next group: a re-queued prompt, or else the next by `prompt_order`; None when
        all are drawn. A re-queued prompt that the dataset's limits exclude stays queued."""
        for requeued in self.dead_letters.requeued.values():
            if (drawn := prompts.draw(requeued)) and drawn[:2] == requeued:
                return drawn
        return prompts.draw(self.prompt_order.choose(self.tallies, self.prompts.next))

    def push(self, sample: Sample) -> None:
        """Queue a sample for its next lease, in the queue that its state calls for."""
        if self.rules.agents and needs_agent(sample):
            self.queue.push_for_agent(sample)
        if sample.state not in (SampleState.ACTING, SampleState.LEASED):
            self.queue.push(sample)

    def raise_expected_lengths(self, ended: Sample) -> None:
        """Queue again each sample of the group that waits for generation and is shorter than the finished response
        `ended`: it is now expected to get as long, which changes its place in the queue."""
        if ended.group.evaluation:
            return
        for sibling in ended.group.samples:
            if sibling.state in TO_GENERATE and sibling.length < ended.length:
                self.queue.push(sibling)

    def set_score(self, sample: Sample, reward: float, details: dict[str, float]) -> None:
        sample.reward, sample.details = reward, details or None
        if isinstance(sample, AgentSample):
            sample.agent_state = b""
        self.open_samples.set_state(sample, SampleState.DONE)

    def requeue_samples(self, group: Group, samples: list[Sample]) -> None:
        """Queue `samples`, whose last lease has ended, for their next one, except those that are dead. If no sample of
        the group needs another lease, make the group ready. A group that is scored as a whole is queued as one
        sample."""
        self.complete_if_done(group)
        representative = group.live_samples[:1] if group.group_scored and group.awaits_scores else None
        for sample in representative or samples:
            if sample.state is not SampleState.DEAD:
                self.push(sample)

    def kill_sample(self, session: Sample, reason: str) -> bool:
        """Mark a sample as dead; returns whether that ends its group, which is then discarded for `reason`."""
        self.leases.revoke(session)
        self.open_samples.set_state(session, SampleState.DEAD)
        session.reward = session.details = None
        self.end_forks(session, SampleState.DEAD)
        group = session.group
        if len(group.live_samples) >= (1 if group.evaluation else self.rules.min_group_size or len(group.samples)):
            return False
        self.end_group(group, reason)
        return True

    def complete_if_done(self, group: Group) -> None:
        """Make a group ready for a batch if none of its samples is pending; the tokens of its dead samples are
        discarded."""
        if group.pending_samples:
            return
        self.open_samples.remove(group)
        if group.evaluation:
            group.state = GroupState.READY
            del self.groups[group.id]
            return
        dead = [sample for sample in group.samples if sample.state is SampleState.DEAD]
        lost = sum(sample.sampled_tokens for sample in dead)
        group.tokens -= lost
        self.account.tokens[group.state] -= lost
        if lost:
            self.account.discarded[DEAD_SAMPLE] += lost
        if dead:
            self.observer.record_discard([fork for sample in dead for fork in sample.with_forks], DEAD_SAMPLE, 0)
        self.account.move(group, GroupState.READY)
        self.ready.add(group)
        if self.rules.filtered:
            self.unfiltered.append(group)
        self.tallies.complete_group(group)
        self.dead_letters.groups_in_a_row = 0

    def end_group(self, group: Group, reason: str) -> None:
        for sample in group.samples:
            self.leases.revoke(sample)
        if group.state is GroupState.OPEN:
            self.open_samples.remove(group)
        del self.groups[group.id]
        if group.evaluation:
            group.state = GroupState.DISCARDED
            return
        if reason == DEAD_SAMPLE:
            self.dead_letters.groups_in_a_row += 1
            self.dead_letters.discard(group.id)
        else:
            self.prompts.forget(group.row)
        if group in self.ready:
            self.ready.remove(group)
        if group.state is GroupState.DELIVERED:
            self.deliveries[group.step].remove(group)
        else:
            self.bound.remove(group.opened_at)
        self.account.move(group, GroupState.DISCARDED)
        self.account.count_discarded(group, reason, 1)
        self.cohorts.finish(group.ordinal, [sample.sampled_tokens for sample in group.samples], [])
        self.observer.record_discard(list(group.samples_with_forks), reason, 0)
        group.forget()

    def forget_evaluation(self, step: int) -> None:
        """Drop the groups of the evaluation of policy step `step`, and end those that are still open."""
        for group in self.evaluations.pop(step):
            if group.state is GroupState.OPEN:
                self.end_group(group, "")
            group.forget()
        self.evaluated_versions.pop(step, None)

    def end_session(self, sample: Sample, superseded: list[tuple[int, int]]) -> None:
        """End an agent session: discard incomplete turns, and `superseded` tokens, which only an earlier execution of
        the agent has received: (fork number, length) means those of this fork after `length` tokens."""
        self.leases.revoke(sample)
        for fork, complete_turns_length, known_length in turn_ends_by_fork(sample, superseded):
            self.cut(fork, complete_turns_length, "unread")
            self.cut(fork, known_length, "superseded")
        self.end_forks(sample, SampleState.DONE)
        sample.finish_reason = "stop"

    def end_forks(self, sample: Sample, state: SampleState) -> None:
        """Set all forks of a session to the state `state`, done or dead, and remove forks without sampled tokens."""
        if not isinstance(sample, AgentSample):
            return
        for fork in sample.forks:
            self.open_samples.set_state(fork, state)
            if not fork.own_sampled_tokens:
                self.open_samples.remove_fork(fork)
        sample.forks = tuple(fork for fork in sample.forks if fork.own_sampled_tokens)

    def cut(self, sample: Sample, length: int, reason: str) -> None:
        """Discard, for `reason`, a sample's tokens after offset `length`, the end of a turn; the sample's group must be
        open."""
        group = sample.group
        if sample.sampled_until > length and not group.evaluation:
            self.observer.record_discard([sample], reason, length)
        dropped = sample.cut(length)
        group.tokens -= dropped
        if dropped and not group.evaluation:
            self.account.tokens[group.state] -= dropped
            self.account.discarded[reason] += dropped
