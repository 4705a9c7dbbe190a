"""The schedule without rounds: a fixed number of samples in flight, also while the learner trains."""

from dataclasses import dataclass

from april.broker.ledger import Ledger
from april.broker.samples import Group, GroupState, Sample
from april.broker.schedule import Prompts

LEAST_BACKLOG, MOST_BACKLOG = 1.0, 2.0
"""batches of complete groups beside which no group is opened, see `ContinuousSchedule.backlog`"""


@dataclass(frozen=True)
class ContinuousRules:
    in_flight: int
    """C: training samples generated at a time"""
    max_steps: int
    train_last_batch: bool = True
    """deliver what is left when the prompts are exhausted"""


class ContinuousSchedule:
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

    def __init__(self, rules: ContinuousRules, prompts: Prompts):
        self.rules = rules
        self.prompts = prompts

    def advance(self, ledger: Ledger) -> bool:
        """Deliver a batch if the learner has none; True when that was the last one."""
        if not self.finished(ledger):
            if not ledger.round_open:
                ledger.start_round()
            if ledger.consumed == ledger.next_step:
                self._try_deliver(ledger)
        if not ledger.round_open or not self.finished(ledger):
            return False
        ledger.end_round()
        return True

    def finished(self, ledger: Ledger) -> bool:
        """No batch will follow the ones that were delivered."""
        if ledger.next_step >= self.rules.max_steps:
            return True
        least = 1 if self.rules.train_last_batch else ledger.rules.batch_groups
        return len(ledger.ready) < least and self._all_complete(ledger)

    def floor(self, ledger: Ledger) -> int:
        """Below it, a worker's new group would be overdue when it is opened."""
        return max(0, ledger.next_step - ledger.rules.max_staleness)

    def next_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """What a worker at policy step `step` generates next, of a group opened for it if no other has one."""
        if not self._has_room(ledger):
            return None
        started_or_fresh = ledger.queue.take_started(step) or ledger.queue.take_fresh(step)
        if started_or_fresh or not self._open_group(ledger, step):
            return started_or_fresh
        return ledger.queue.take_fresh(step)

    def urgent_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """What must be in the batch that is being made, lest it be overdue."""
        if not self._has_room(ledger):
            return None
        return ledger.queue.take_due(step, opened_by=ledger.next_step - ledger.rules.max_staleness)

    def backlog(self, ledger: Ledger) -> float:
        """No group is opened while so many batches of complete groups wait.

        They are the supply of a learner that trains. But they also pile up while it waits for an old group that must
        be in the next batch and is not complete: afterwards they are trained one after the other, and what is open by
        then is due sooner by as many batches, so that more of them make the next straggler late as well. One batch is
        enough, unless stragglers are late anyway: beside the longest response, in_flight * longest / mean other
        samples complete, and what of them is more than S batches has to wait. The mean is that of the trained tokens.
        """
        trained = ledger.tokens[GroupState.TRAINED]
        if not trained:
            return MOST_BACKLOG
        rules = ledger.rules
        mean_length = trained / (ledger.counts[GroupState.TRAINED] * rules.group_size)
        batch_tokens = mean_length * rules.group_size * rules.batch_groups
        beside_longest = self.rules.in_flight * rules.max_response_tokens / batch_tokens
        return min(MOST_BACKLOG, max(LEAST_BACKLOG, beside_longest - rules.max_staleness))

    def _has_room(self, ledger: Ledger) -> bool:
        return ledger.round_open and ledger.generating < self.rules.in_flight

    def _open_group(self, ledger: Ledger, step: int) -> bool:
        """Draw the next prompt for a worker at `step`, if some batch needs its group soon and the bound admits it."""
        batches_left = self.rules.max_steps - ledger.next_step
        if len(ledger.ready) >= batches_left * ledger.rules.batch_groups:
            return False
        if len(ledger.ready) >= self.backlog(ledger) * ledger.rules.batch_groups:
            return False
        if not ledger.bound.survives(ledger.next_step, step) or (prompt := ledger.next_prompt(self.prompts)) is None:
            return False
        epoch, row, tokens = prompt
        ledger.open_group(epoch, row, floor=step, prompt=tokens)
        return True

    def _try_deliver(self, ledger: Ledger) -> None:
        if batch := ledger.choose_batch(ledger.rules.batch_groups) or self._last_batch(ledger):
            ledger.deliver(batch)

    def _last_batch(self, ledger: Ledger) -> list[Group] | None:
        few = len(ledger.ready) < ledger.rules.batch_groups
        if few and self.rules.train_last_batch and self._all_complete(ledger):
            return ledger.choose_batch(len(ledger.ready))
        return None

    def _all_complete(self, ledger: Ledger) -> bool:
        """Every prompt has been drawn, and its group is no longer open."""
        return ledger.counts[GroupState.OPEN] == 0 and ledger.next_prompt(self.prompts) is None
