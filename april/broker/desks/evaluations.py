"""When held-out prompts are asked, what came of it, and which weights were the best by that."""

import logging

from april.broker.books import Books
from april.broker.ledger.samples import Group, GroupState
from april.broker.telemetry.evaluation import accuracy_of, describe_evaluation

log = logging.getLogger(__name__)


class Evaluations:
    """Of a run; all that they rest on is in the ledger.

    evaluations.open_due()
    evaluations.record_complete()
    evaluations.best()
    """

    def __init__(self, books: Books):
        self.books, self.ledger = books, books.ledger
        self.section, self.held_out = books.config.evaluation, books.prompts.held_out

    def open_due(self) -> None:
        """Ask, if the weights at hand are to be evaluated and have not been."""
        step = self.ledger.consumed
        if not self._is_due(step):
            return
        for number, one in self.held_out.items():
            for position, tokens in one.tokens:
                self.ledger.open_group(
                    number, position, floor=step, evaluation=True, size=one.asked.samples, prompt=tokens
                )

    def _is_due(self, step: int) -> bool:
        opened = step in self.ledger.evaluations or step in self.ledger.evaluated
        if not any(one.tokens for one in self.held_out.values()) or opened or step < self.ledger.frontier:
            return False
        every = self.section.every
        at_the_end = self.books.schedule.finished(self.ledger) and step == self.ledger.next_step
        return step == 0 or at_the_end or bool(every and step % every == 0)

    def record_complete(self) -> None:
        """Those of which no group is open any more."""
        for step, groups in list(self.ledger.evaluations.items()):
            if any(group.state is GroupState.OPEN for group in groups):
                continue
            of_sets: dict[int, list[Group]] = {number: [] for number in self.held_out}
            for group in groups:
                of_sets[group.epoch].append(group)
            asked = [(self.held_out[number].asked, found) for number, found in of_sets.items()]
            result = self.books.recorder.evaluated(step, asked)
            self.ledger.record_evaluation(step, result)
            log.info("%s", describe_evaluation(result), extra={"step": step})

    def best(self) -> int | None:
        """Step of the trained weights that were the most accurate on the chosen set, of like ones the later."""
        found = {step: accuracy_of(result, self.section.best) for step, result in self.ledger.evaluated.items() if step}
        known = [(accuracy, step) for step, accuracy in found.items() if accuracy is not None]
        return max(known)[1] if known and self.section.best else None

    def undecided(self) -> list[int]:
        """Steps of the trained weights that are still being evaluated."""
        return [step for step in self.ledger.evaluations if step and self.section.best]
