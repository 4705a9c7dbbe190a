"""Runs the evaluations of the learner's weights on held-out prompts, each under a single version."""

import logging
from collections import defaultdict

from april import wire
from april.broker.context import BrokerContext
from april.broker.ledger.samples import NOT_EVALUATED, TO_GENERATE, Group, GroupState, SampleState
from april.broker.peers import Peer
from april.broker.telemetry.evaluation import describe_evaluation, is_complete, score_of

log = logging.getLogger(__name__)

WITHOUT_WORKER = (*TO_GENERATE, SampleState.ACTING)
"""States of held-out samples that still need a worker with the evaluated version."""


class Evaluations:
    """Schedules evaluations of held-out prompts, records their results, and finds the best weights by them.

    An evaluation is of one version. Its samples are leased to workers with that version alone. While some of them wait,
    the workers are told to put their weight updates off. Samples that are unfinished `evaluation.hold_s` after newer
    weights exist, or once no worker has the version, are discarded and counted as not evaluated.

    The ledger holds all state of the evaluations, except for times.

    evaluations.open_due()
    evaluations.record_complete()
    evaluations.announce()              # after the grants of a pass
    evaluations.watch(now)              # now and then
    evaluations.best()
    """

    def __init__(self, context: BrokerContext):
        self.context, self.ledger = context, context.ledger
        self.section, self.held_out = context.config.evaluation, context.prompts.held_out
        self._announced: list[int] = []
        self._overtaken_at: dict[int, float] = {}
        """Time at which newer weights than those of an evaluation in progress were first seen, by evaluated policy
        step."""
        self._held_slot_s: defaultdict[int, float] = defaultdict(float)
        """Slot-seconds that workers idled because they put off a weight update for an evaluation, by evaluated policy
        step."""
        self._watched_at = 0.0

    # --- opening and recording ----------------------------------------------------------------------------------

    def open_due(self) -> None:
        """Open groups for the held-out prompts, unless the current weights have been or are being evaluated. Weights
        are evaluated at step 0, at each multiple of `evaluation.every`, and at the last step."""
        step = self.ledger.steps.consumed
        if not self._is_due(step):
            return
        for number, held_out in self.held_out.items():
            for position, tokens in held_out.tokens:
                self.ledger.open_group(
                    number, position, floor=step, evaluation=True, size=held_out.settings.samples, prompt=tokens
                )

    def _is_due(self, step: int) -> bool:
        opened = step in self.ledger.evaluations or step in self.ledger.evaluated
        has_prompts = any(held_out.tokens for held_out in self.held_out.values())
        if not has_prompts or opened or step < self.ledger.steps.frontier:
            return False
        every = self.section.every
        at_the_end = self.context.schedule.finished(self.ledger) and step == self.ledger.steps.next
        return step == 0 or at_the_end or bool(every and step % every == 0)

    def record_complete(self) -> None:
        """Record the result of each evaluation none of whose groups is open any more."""
        for step, groups in list(self.ledger.evaluations.items()):
            if any(group.state is GroupState.OPEN for group in groups):
                continue
            by_set: dict[int, list[Group]] = {number: [] for number in self.held_out}
            for group in groups:
                by_set[group.epoch].append(group)
            evaluated = [(self.held_out[number].settings, groups) for number, groups in by_set.items()]
            version, held_slot_s = self.ledger.evaluated_versions.get(step), self._held_slot_s.pop(step, 0.0)
            result = self.context.recorder.record_evaluation(step, version, evaluated, held_slot_s)
            self.ledger.record_evaluation(step, result)
            self._overtaken_at.pop(step, None)
            log.info("%s", describe_evaluation(result), extra={"step": step})

    # --- one version --------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Tell all workers at which policy steps held-out samples wait for a worker, if that has changed since the last
        call."""
        if (waiting := self._waiting()) != self._announced:
            self._announced = waiting
            for peer in self.context.peers.workers():
                self.greet(peer)

    def greet(self, peer: Peer) -> None:
        """Tell a worker at which policy steps held-out samples wait for a worker, over its data connection, by which
        grants also come."""
        self.context.peers.send(peer, wire.Evaluating(self._waiting()))

    def _waiting(self) -> list[int]:
        """Policy steps of the evaluations of which some samples still have to be leased to a worker."""
        if not any(self.ledger.open_samples.count(state, evaluation=True) for state in WITHOUT_WORKER):
            return []
        return [
            step
            for step, groups in self.ledger.evaluations.items()
            if any(sample.state in WITHOUT_WORKER for group in reversed(groups) for sample in group.samples_with_forks)
        ]

    def watch(self, now: float) -> None:
        """Discard or restart evaluations that can get no further tokens under their version (`_can_go_on`), and add up
        the slots that sit idle because an evaluation keeps workers on old weights."""
        elapsed_s, self._watched_at = now - (self._watched_at or now), now
        for step, groups in list(self.ledger.evaluations.items()):
            overtaken = self._is_overtaken(step)
            if overtaken:
                self._held_slot_s[step] += elapsed_s * self._idle_slots(step)
            if self._can_go_on(step, groups, overtaken, now):
                continue
            if not overtaken:
                log.warning("the evaluation begins again, as no worker has its version any more", extra={"step": step})
                self.ledger.restart_evaluation(step)
                continue
            for group in groups:
                if group.state is GroupState.OPEN and group.unfinished:
                    self.ledger.discard(group, NOT_EVALUATED)

    def _is_overtaken(self, step: int) -> bool:
        """Whether the learner has newer weights than those of `step`. Where learner and engines take turns on the same
        accelerators: whether batch `step` has been delivered, for which the learner needs the accelerators."""
        steps = self.ledger.steps
        return (steps.next if self.context.config.devices.turns else steps.consumed) > step

    def _can_go_on(self, step: int, groups: list[Group], overtaken: bool, now: float) -> bool:
        """Whether the evaluation of `step` may still get tokens: it has time left, and some worker may have its
        version. `overtaken`: result of `_is_overtaken`."""
        named = self.ledger.evaluated_versions.get(step)
        if overtaken:
            if now - self._overtaken_at.setdefault(step, now) >= self.section.hold_s:
                return False
        elif (
            named is None or named.incarnation == self.ledger.learner.incarnation or step != self.ledger.steps.consumed
        ):
            self._overtaken_at.pop(step, None)
            return True
        if any(sample.state is SampleState.LEASED for group in groups for sample in group.samples_with_forks):
            return True
        versions = [peer.version for peer in self.context.peers.workers() if peer.version]
        return not versions or any(
            version.step < step or (version.step == step and self.ledger.may_evaluate(version)) for version in versions
        )

    def _idle_slots(self, step: int) -> int:
        """Number of free slots of the workers whose weights are those of `step`."""
        load, prefetch = self.ledger.leases.load, self.context.config.worker.prefetch
        return sum(
            max(0, peer.capacity - prefetch - load[peer.uid, False] - load[peer.uid, True])
            for peer in self.context.peers.workers()
            if peer.step == step
        )

    # --- the best -----------------------------------------------------------------------------------------------

    def best(self) -> int | None:
        """Policy step of the trained weights that did best on the set `evaluation.best`: by accuracy, or by reward if
        the accuracy is not known; of equals the later step. None if there is no such set or no score yet.

        An evaluation that left prompts out does not count, since those are the prompts with the longest responses.
        """
        name = self.section.best
        scores = {
            step: score_of(result, name)
            for step, result in self.ledger.evaluated.items()
            if step and is_complete(result, name)
        }
        known = [(score, step) for step, score in scores.items() if score is not None]
        return max(known)[1] if known and name else None

    def undecided(self) -> list[int]:
        """Policy steps of trained weights that are still being evaluated."""
        return [step for step in self.ledger.evaluations if step and self.section.best]
