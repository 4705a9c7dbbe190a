"""Schedules by rounds: when a round starts, what it opens, and when N groups make a batch.

`sync` waits for all N groups. `april` opens N' at once, stops at N, and resumes the unfinished first in the next
round; with N' < N it opens groups in steps of N' until N are complete. Both are one class with different numbers.
"""

from dataclasses import dataclass

from april.broker.ledger import Ledger
from april.broker.samples import Group, GroupState, Sample
from april.broker.schedule import Prompts


@dataclass(frozen=True)
class RoundRules:
    batch_groups: int
    """N"""
    round_groups: int
    """N'"""
    max_steps: int
    partial_rollout: bool = True
    overlap: bool = False
    """leases of round k need version k - 1 instead of k"""
    train_last_batch: bool = True
    """deliver what is left when the prompts are exhausted"""


class RoundSchedule:
    """Drives a ledger round by round.

    A round makes the next batch. It starts when every grant of the round before is back, and ends when N complete
    groups can be delivered within the staleness bound; then all unfinished work is handed back.
    """

    def __init__(self, rules: RoundRules, prompts: Prompts):
        self.rules = rules
        self.prompts = prompts
        self.exhausted = False

    def advance(self, ledger: Ledger) -> bool:
        """Start or end rounds, open groups and deliver a batch as the ledger permits; True when a round ended."""
        if not ledger.round_open:
            if ledger.next_step >= self.rules.max_steps or self.finished(ledger) or not self._settle(ledger):
                return False
            ledger.start_round()
            self._open_groups(ledger)
        elif ledger.undelivered < self.rules.batch_groups:
            self._open_groups(ledger)
        return self._try_deliver(ledger)

    def finished(self, ledger: Ledger) -> bool:
        """No batch will follow the ones that were delivered."""
        if ledger.next_step >= self.rules.max_steps:
            return True
        nothing_left = self.exhausted and not ledger.round_open and ledger.counts[GroupState.OPEN] == 0
        too_few = len(ledger.ready) < (1 if self.rules.train_last_batch else self.rules.batch_groups)
        return nothing_left and too_few and ledger.next_prompt(self.prompts) is None

    def floor(self, ledger: Ledger) -> int:
        """The policy step that leases for the batch being made need."""
        return max(0, ledger.next_step - 1) if self.rules.overlap else ledger.next_step

    def next_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """What a worker at policy step `step` generates next: of started groups, then of fresh ones."""
        if not ledger.round_open or step < self.floor(ledger):
            return None
        return ledger.queue.take_started(step) or ledger.queue.take_fresh(step)

    def urgent_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """What must be in the batch that is being made, lest it be overdue."""
        if not ledger.round_open or step < self.floor(ledger):
            return None
        return ledger.queue.take_due(step, opened_by=ledger.next_step - ledger.rules.max_staleness)

    def _settle(self, ledger: Ledger) -> bool:
        """Whether every grant of the last round is back; without partial rollout its open groups end here."""
        if ledger.generating:
            return False
        if not self.rules.partial_rollout:
            for group in ledger.open_groups():
                if group.unfinished:
                    ledger.discard(group, "aborted")
        return True

    def _open_groups(self, ledger: Ledger) -> None:
        for _ in range(self._groups_to_open(ledger)):
            floor = self.floor(ledger)
            prompt = ledger.next_prompt(self.prompts)
            self.exhausted = prompt is None
            if prompt is None or not ledger.bound.survives(ledger.next_step, floor):
                return
            epoch, row, tokens = prompt
            ledger.open_group(epoch, row, floor, prompt=tokens)

    def _groups_to_open(self, ledger: Ledger) -> int:
        wanted, at_once = self.rules.batch_groups, self.rules.round_groups
        if at_once >= wanted:
            return at_once - ledger.undelivered
        return 0 if ledger.counts[GroupState.OPEN] else min(at_once, wanted - len(ledger.ready))

    def _try_deliver(self, ledger: Ledger) -> bool:
        batch = ledger.choose_batch(self.rules.batch_groups) or self._last_batch(ledger)
        if batch:
            ledger.deliver(batch)
        elif not (self.exhausted and ledger.counts[GroupState.OPEN] == 0):
            return False
        ledger.end_round()
        return True

    def _last_batch(self, ledger: Ledger) -> list[Group] | None:
        if self.exhausted and self.rules.train_last_batch and ledger.counts[GroupState.OPEN] == 0:
            return ledger.choose_batch(len(ledger.ready))
        return None
