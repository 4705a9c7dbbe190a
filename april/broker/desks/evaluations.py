"""Schedules evaluations of held-out prompts, records their results, and finds the best weights by them."""

import logging

from april.broker.books import BrokerContext
from april.broker.ledger.samples import Group, GroupState
from april.broker.telemetry.evaluation import accuracy_of, describe_evaluation

log = logging.getLogger(__name__)


class Evaluations:
    """Evaluations of a run; all their state is in the ledger.

    evaluations.open_due()
    evaluations.record_complete()
    evaluations.best()
    """

    def __init__(self, context: BrokerContext):
        self.context, self.ledger = context, context.ledger
        self.section, self.held_out = context.config.evaluation, context.prompts.held_out

    def open_due(self) -> None:
        """Open groups for the held-out prompts if the current weights are due for evaluation."""
        step = self.ledger.consumed
        if not self._is_due(step):
            return
        for number, held_out in self.held_out.items():
            for position, tokens in held_out.tokens:
                self.ledger.open_group(
                    number, position, floor=step, evaluation=True, size=held_out.settings.samples, prompt=tokens
                )

    def _is_due(self, step: int) -> bool:
        opened = step in self.ledger.evaluations or step in self.ledger.evaluated
        if not any(held_out.tokens for held_out in self.held_out.values()) or opened or step < self.ledger.frontier:
            return False
        every = self.section.every
        at_the_end = self.context.schedule.finished(self.ledger) and step == self.ledger.next_step
        return step == 0 or at_the_end or bool(every and step % every == 0)

    def record_complete(self) -> None:
        """Record the evaluations that have no open group any more."""
        for step, groups in list(self.ledger.evaluations.items()):
            if any(group.state is GroupState.OPEN for group in groups):
                continue
            by_set: dict[int, list[Group]] = {number: [] for number in self.held_out}
            for group in groups:
                by_set[group.epoch].append(group)
            evaluated = [(self.held_out[number].settings, groups) for number, groups in by_set.items()]
            result = self.context.recorder.record_evaluation(step, evaluated)
            self.ledger.record_evaluation(step, result)
            log.info("%s", describe_evaluation(result), extra={"step": step})

    def best(self) -> int | None:
        """Policy step of the most accurate trained weights on the set `evaluation.best`, the later one of equals; None
        if there is no such set or no accuracy yet."""
        accuracies = {
            step: accuracy_of(result, self.section.best) for step, result in self.ledger.evaluated.items() if step
        }
        known = [(accuracy, step) for step, accuracy in accuracies.items() if accuracy is not None]
        return max(known)[1] if known and self.section.best else None

    def undecided(self) -> list[int]:
        """Policy steps of trained weights that are still being evaluated."""
        return [step for step in self.ledger.evaluations if step and self.section.best]
