"""The schedule without rounds: a fixed number of samples in flight, also while the learner trains."""

from collections.abc import Mapping
from typing import Any

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.prompts import Prompts
from april.broker.ledger.samples import Group, GroupState, Sample
from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Dial, Schedule
from april.config import ConfigError, ScheduleSection

LEAST_BACKLOG, MOST_BACKLOG = 1.0, 2.0
"""batches of complete groups beside which no group is opened, see `ContinuousSchedule.backlog`"""
REMEMBERED = 0.9
"""of what batches have shown, when the next one is added to it"""


class ContinuousSchedule(Schedule):
    """Keeps `in_flight` samples in generation, within the staleness bound.

    With N groups in a batch, S the largest staleness, k the next batch, v0(g) the step of the worker's version at
    the first lease of group g, and d(g) = v0(g) + S, it keeps

        for every D >= k - 1:  #{undelivered g : d(g) <= D}  <=  (D - k + 1) * N

    by two tests (`StalenessBound` says why they suffice). Admission: a group is opened at the moment in which a
    worker with a free slot is to start it, so that v0(g) is that worker's step at once, only if the invariant
    survives, and only while complete groups do not pile up (`backlog`). Delivery: the oldest N complete groups
    make batch k only if the invariant holds for k + 1; otherwise the learner waits for what is due. Batch k is not
    fixed before the learner has trained all batches before it, so that what completes meanwhile can still go first.

    One round lasts from the first group to the last batch; then all unfinished work is handed back, and waits for
    the run to be resumed with more steps.
    """

    by_rounds = False
    dial = Dial("in_flight", counts_samples=True)
    reads = ("over_sampling_batch_size", "in_flight")

    @classmethod
    def check(cls, section: ScheduleSection) -> None:
        """Refuse what it has no use for, and more samples in flight than the staleness bound ever admits."""
        instead = SCHEDULES.those(lambda kind: kind.by_rounds and kind.dial)
        if not section.partial_rollout:
            raise ConfigError(
                f"key 'schedule.partial_rollout' = False cannot be: schedule.kind = {section.kind!r} ends no round, so "
                f"that nothing is discarded unfinished; leave it true, or use schedule.kind = {instead}"
            )
        if section.overlap:
            raise ConfigError(
                f"key 'schedule.overlap' = True says nothing: schedule.kind = {section.kind!r} always generates while "
                f"the learner trains; leave it out, or use schedule.kind = {instead}"
            )
        groups, n = section.rollout_batch_size, section.n_samples_per_prompt
        admitted = section.batches_in_reach * groups * n
        if section.in_flight is not None and section.in_flight > admitted:
            raise ConfigError(
                f"key 'schedule.in_flight' = {section.in_flight} exceeds {admitted}, the most samples that "
                f"schedule.max_staleness = {section.max_staleness} ever admits for {groups} x {n} in a batch; "
                "lower it or raise max_staleness"
            )

    @classmethod
    def variants(cls, section: ScheduleSection) -> dict[str, Mapping[str, Any]]:
        """Half of what over-sampling starts, as much, and as many as the scenario says; the second also without a cache
        that outlives an update."""
        peak = section.over_sampled * section.n_samples_per_prompt
        counts = sorted({peak // 2, peak, section.in_flight or peak})
        return {
            **{f"{count} in flight": {"in_flight": count} for count in counts},
            f"{peak}, cache recomputed": {"in_flight": peak, "weights__keep_kv": False},
        }

    def __init__(self, section: ScheduleSection, prompts: Prompts):
        super().__init__(section, prompts)
        self._mean = self._longest = 0.0
        """tokens of the samples of a group, and of its longest, summed over the groups of the last batches"""

    def advance(self, ledger: Ledger) -> bool:
        """Deliver a batch if the learner has none; True when that was the last one."""
        if not self.finished(ledger):
            if not ledger.round_open:
                ledger.start_round()
            if ledger.consumed < ledger.next_step or not (batch := self.next_batch(ledger)):
                return False
            self._learn_lengths(batch)
            ledger.deliver(batch)
        if not ledger.round_open or not self.finished(ledger):
            return False
        ledger.end_round()
        return True

    def floor(self, ledger: Ledger) -> int:
        """Below it, a worker's new group would be overdue when it is opened."""
        return max(0, ledger.next_step - ledger.rules.max_staleness)

    def hands_out(self, ledger: Ledger, step: int) -> bool:
        return ledger.round_open and ledger.generating < self.section.most_in_flight

    def next_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """What a worker at policy step `step` generates next, of a group opened for it if no other has one."""
        waiting = super().next_sample(ledger, step)
        if waiting or ledger.rules.agents or not self.hands_out(ledger, step) or not self._open_group(ledger, step):
            return waiting
        return ledger.queue.take_fresh(step)

    def next_for_agent(self, ledger: Ledger) -> Sample | None:
        """Of a group opened for it if no other waits: agents open groups, since they speak first."""
        waiting = super().next_for_agent(ledger)
        if waiting or not ledger.round_open or not self._open_group(ledger, ledger.consumed):
            return waiting
        return super().next_for_agent(ledger)

    def backlog(self, ledger: Ledger) -> float:
        """No group is opened while so many batches of complete groups wait.

        They are the supply of a learner that trains. But they also pile up while it waits for an old group that must
        be in the next batch and is not complete: afterwards they are trained one after the other, and what is open by
        then is due sooner by as many batches, so that more of them make the next straggler late as well. One batch is
        enough, unless stragglers are late anyway: beside the longest response, in_flight * longest / mean other
        samples complete, and what of them is more than S batches has to wait. The mean is that of the trained tokens.
        """
        if not ledger.tokens[GroupState.TRAINED]:
            return MOST_BACKLOG
        return min(MOST_BACKLOG, max(LEAST_BACKLOG, self._beside_longest(ledger) - ledger.rules.max_staleness))

    def _beside_longest(self, ledger: Ledger) -> float:
        """Batches of samples that complete while the longest response is generated."""
        rules, trained = ledger.rules, ledger.tokens[GroupState.TRAINED]
        mean_length = trained / (ledger.counts[GroupState.TRAINED] * rules.group_size)
        batch_tokens = mean_length * rules.group_size * rules.batch_groups
        return self.section.most_in_flight * rules.max_response_tokens / batch_tokens

    def _learn_lengths(self, batch: list[Group]) -> None:
        self._mean, self._longest = REMEMBERED * self._mean, REMEMBERED * self._longest
        for group in batch:
            self._mean += group.tokens / len(group.samples)
            self._longest += max(sample.sampled for sample in group.samples)

    def _flight_lacks_groups(self, ledger: Ledger) -> bool:
        """Whether fewer are undelivered than it takes to have `in_flight` samples in generation, and a batch. Never
        where stragglers may be late, of which a larger backlog would make more.

        A group lasts as long as its longest sample, so that it takes in_flight / n groups times the longest over the
        mean length. To open none beside a batch that waits stops many batches in flight: what is open goes on to
        complete for as long as the longest response takes, and nothing comes behind it; then all begin at once, to
        complete at once. Of a constant number of undelivered groups each batch that is delivered makes room for its
        own, and a learner that falls behind slows generation down as far as it has to.
        """
        rules = ledger.rules
        if rules.agents or not self._mean or not ledger.tokens[GroupState.TRAINED]:
            return False
        if self._beside_longest(ledger) + LEAST_BACKLOG > rules.max_staleness:
            return False
        wanted = self.section.most_in_flight / rules.group_size * self._longest / self._mean + rules.batch_groups
        return ledger.counts[GroupState.OPEN] + len(ledger.ready) < wanted

    def _open_group(self, ledger: Ledger, step: int) -> bool:
        """Draw the next prompt for a worker at `step`, if some batch needs its group soon and the bound admits it."""
        batches_left = self.section.max_steps - ledger.next_step
        if len(ledger.ready) >= batches_left * ledger.rules.batch_groups:
            return False
        is_behind = len(ledger.ready) >= self.backlog(ledger) * ledger.rules.batch_groups
        if is_behind and not self._flight_lacks_groups(ledger):
            return False
        if not ledger.bound.survives(ledger.next_step, step) or (prompt := ledger.next_prompt(self.prompts)) is None:
            return False
        epoch, row, tokens = prompt
        ledger.open_group(epoch, row, floor=step, prompt=tokens)
        return True
