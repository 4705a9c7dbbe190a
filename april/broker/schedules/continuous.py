"""The schedule `continuous`: keeps a fixed number of samples in flight, also while the learner trains."""

from collections.abc import Mapping
from typing import Any

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Prompts
from april.broker.ledger.samples import Group, GroupState, Sample
from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Dial, Schedule
from april.config import ScheduleSection
from april.util.errors import refuse

LEAST_BACKLOG, MOST_BACKLOG = 1.0, 2.0
"""Least and largest value of `ContinuousSchedule.backlog`, in batches' worth of complete groups."""
DECAY = 0.9
"""Factor by which the moving sums of response lengths shrink when a batch's lengths are added."""


class ContinuousSchedule(Schedule):
    """Keeps `in_flight` samples in generation, within the staleness bound.

    With N groups in a batch, S the largest staleness, k the next batch, v0(g) the step of the worker's version at
    the first lease of group g, and d(g) = v0(g) + S, it keeps

        for every D >= k - 1:  #{undelivered g : d(g) <= D}  <=  (D - k + 1) * N

    by two tests (`StalenessBound` says why they suffice). Admission: a group is opened when a worker with a free slot
    is to start it, so that v0(g) is that worker's step at once; only if the invariant survives, and only while the
    backlog of complete groups is short (`backlog`). Delivery: the oldest N complete groups make batch k only if the
    invariant holds for k + 1; otherwise the learner waits for the groups that batch k must have. Batch k is not fixed
    before the learner has trained all batches before it, so that older groups that complete meanwhile can still go
    first.

    One round lasts from the first group to the last batch; then all unfinished work is handed back and waits for the
    run to be resumed with more steps.
    """

    by_rounds = False
    dial = Dial("in_flight", counts_samples=True)
    reads = ("over_sampling_batch_size", "in_flight")

    @classmethod
    def check(cls, section: ScheduleSection) -> None:
        """Raises ConfigError for keys that have no effect in this schedule, and for more samples in flight than the
        staleness bound ever admits."""
        instead = SCHEDULES.names_where(lambda kind: kind.by_rounds and kind.dial)
        if not section.partial_rollout:
            refuse(
                "schedule.partial_rollout",
                False,
                f"cannot be: schedule.kind = {section.kind!r} ends no round, so that nothing is discarded unfinished",
                f"leave it true, or use schedule.kind = {instead}",
            )
        if section.overlap:
            refuse(
                "schedule.overlap",
                True,
                f"says nothing: schedule.kind = {section.kind!r} always generates while the learner trains",
                f"leave it out, or use schedule.kind = {instead}",
            )
        groups, n = section.rollout_batch_size, section.n_samples_per_prompt
        admitted = section.batches_in_reach * groups * n
        if section.in_flight is not None and section.in_flight > admitted:
            refuse(
                "schedule.in_flight",
                section.in_flight,
                f"exceeds {admitted}, the most samples that schedule.max_staleness = {section.max_staleness} "
                f"ever admits for {groups} x {n} in a batch",
                "lower it or raise max_staleness",
            )

    @classmethod
    def variants(cls, section: ScheduleSection) -> dict[str, Mapping[str, Any]]:
        """Settings that `april simulate` compares, by label: keys of [schedule] and their values. With N' the groups
        that over-sampling opens and n the samples in a group, `in_flight` is N' n / 2, N' n, and what the scenario
        sets; for N' n also without the KV cache being kept at a weight update."""
        peak = section.over_sampled * section.n_samples_per_prompt
        counts = sorted({peak // 2, peak, section.in_flight or peak})
        return {
            **{f"{count} in flight": {"in_flight": count} for count in counts},
            f"{peak}, cache recomputed": {"in_flight": peak, "weights__keep_kv": False},
        }

    def __init__(self, section: ScheduleSection, prompts: Prompts):
        super().__init__(section, prompts)
        self._mean_sum = self._longest_sum = 0.0
        """`_mean_sum`, `_longest_sum`: decayed sums over trained groups of the mean and of the largest number of
        sampled tokens among a group's samples."""

    def advance(self, ledger: Ledger) -> bool:
        """Deliver a batch if the learner has none to train; True when the last batch has ended the round."""
        if not self.finished(ledger):
            if not ledger.rounds.open:
                ledger.start_round()
            if ledger.steps.consumed < ledger.steps.next or not (batch := self.next_batch(ledger)):
                return False
            self._learn_lengths(batch)
            ledger.deliver(batch)
        if not ledger.rounds.open or not self.finished(ledger):
            return False
        ledger.end_round()
        return True

    def floor(self, ledger: Ledger) -> int:
        """Least policy step of the weights of a worker that may open a group. The last permitted batch of a group
        opened at an earlier step (that step + largest staleness) would be before the next batch."""
        return max(0, ledger.steps.next - ledger.rules.max_staleness)

    def hands_out(self, ledger: Ledger, step: int) -> bool:
        return ledger.rounds.open and ledger.leases.generating < self.section.most_in_flight

    def next_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """The next sample for a worker at policy step `step`; if none waits, a group is opened for the worker. None if
        no group may be opened."""
        waiting = super().next_sample(ledger, step)
        if waiting or ledger.rules.agents or not self.hands_out(ledger, step) or not self._open_group(ledger, step):
            return waiting
        return ledger.queue.take_fresh(step)

    def next_for_agent(self, ledger: Ledger) -> Sample | None:
        """The next sample for an agents process; if none waits, a group is opened for it. None if no group may be
        opened."""
        waiting = super().next_for_agent(ledger)
        if waiting or not ledger.rounds.open or not self._open_group(ledger, ledger.steps.consumed):
            return waiting
        return super().next_for_agent(ledger)

    def backlog(self, ledger: Ledger) -> float:
        """Number of batches' worth of complete groups at which no further group is opened.

        A backlog keeps the learner busy. But it also grows while the learner waits for an old group that must be in the
        next batch and is not complete. Once that group completes, the backlog is trained at once, which brings the open
        groups as many batches closer to their deadlines and makes the next straggler late as well. One batch is enough,
        unless stragglers are late anyway: while the longest response is generated, in_flight * longest / mean other
        samples complete, and whatever exceeds S batches has to wait. The mean is that of the trained tokens per sample.
        """
        if not ledger.account.tokens[GroupState.TRAINED]:
            return MOST_BACKLOG
        return min(MOST_BACKLOG, max(LEAST_BACKLOG, self._batches_per_longest(ledger) - ledger.rules.max_staleness))

    def _batches_per_longest(self, ledger: Ledger) -> float:
        """Number of batches' worth of samples that complete while the longest response is generated."""
        rules, trained = ledger.rules, ledger.account.tokens[GroupState.TRAINED]
        mean_length = trained / (ledger.account.counts[GroupState.TRAINED] * rules.group_size)
        batch_tokens = mean_length * rules.group_size * rules.batch_groups
        return self.section.most_in_flight * rules.max_response_tokens / batch_tokens

    def _learn_lengths(self, batch: list[Group]) -> None:
        self._mean_sum, self._longest_sum = DECAY * self._mean_sum, DECAY * self._longest_sum
        for group in batch:
            self._mean_sum += group.tokens / len(group.samples)
            self._longest_sum += max(sample.sampled_tokens for sample in group.samples)

    def _flight_lacks_groups(self, ledger: Ledger) -> bool:
        """Whether there are fewer undelivered groups than it takes to keep `in_flight` samples in generation and one
        batch of groups complete.

        Never true if stragglers may miss their deadline, since a larger backlog would make more of them late.

        A group lasts as long as its longest sample, so keeping `in_flight` samples in generation takes
        in_flight / n * longest / mean groups. Opening none while a batch waits would let that flight run dry for as
        long as the longest response takes; then all groups would start, and complete, together. With a constant number
        of undelivered groups, each delivered batch admits as many new groups, and a slow learner throttles generation.
        """
        rules = ledger.rules
        if rules.agents or not self._mean_sum or not ledger.account.tokens[GroupState.TRAINED]:
            return False
        if self._batches_per_longest(ledger) + LEAST_BACKLOG > rules.max_staleness:
            return False
        groups_in_flight = self.section.most_in_flight / rules.group_size * self._longest_sum / self._mean_sum
        return ledger.account.counts[GroupState.OPEN] + len(ledger.ready) < groups_in_flight + rules.batch_groups

    def _open_group(self, ledger: Ledger, step: int) -> bool:
        """Open a group for a worker at policy step `step`; returns whether it was opened. The remaining batches must
        need it, `backlog` or `_flight_lacks_groups` must call for it, the staleness bound admit it, and a prompt be
        left."""
        remaining_batches = self.section.max_steps - ledger.steps.next
        if len(ledger.ready) >= remaining_batches * ledger.rules.batch_groups:
            return False
        is_behind = len(ledger.ready) >= self.backlog(ledger) * ledger.rules.batch_groups
        if is_behind and not self._flight_lacks_groups(ledger):
            return False
        if not ledger.bound.survives(ledger.steps.next, step) or (prompt := ledger.next_prompt(self.prompts)) is None:
            return False
        epoch, row, tokens = prompt
        ledger.open_group(epoch, row, floor=step, prompt=tokens)
        return True
