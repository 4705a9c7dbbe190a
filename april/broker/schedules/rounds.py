"""Schedules by rounds, `april` and `sync`: when a round starts, what it opens, and when N groups make a batch."""

from collections.abc import Mapping
from typing import Any

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Prompts
from april.broker.ledger.samples import GroupState
from april.broker.schedules import SCHEDULES
from april.broker.schedules.schedule import Dial, Schedule
from april.config import ScheduleSection
from april.util.errors import refuse


class RoundSchedule(Schedule):
    """Drives a ledger round by round. A round needs N complete groups, those of a batch. If it opens N' > N groups at
    once, it ends when N are complete, and the next round resumes the unfinished groups first. With N' < N it opens
    groups in steps of N' until N are complete.

    A round makes the next batch. It starts when every generation lease of the round before has been handed back, and
    ends when N complete groups can be delivered within the staleness bound; then all unfinished work is handed back.
    """

    reads = ("over_sampling_batch_size", "partial_rollout", "overlap")

    def __init__(self, section: ScheduleSection, prompts: Prompts):
        super().__init__(section, prompts)
        self.exhausted = False
        """Whether no prompt was left when the schedule last tried to open a group."""

    @classmethod
    def groups_outlive_a_round(cls, section: ScheduleSection) -> bool:
        return section.groups_per_round > section.rollout_batch_size

    def advance(self, ledger: Ledger) -> bool:
        """Start or end rounds, open groups and deliver a batch as the ledger permits; True when a round ended."""
        if not ledger.rounds.open:
            if self.finished(ledger) or not self._settle(ledger):
                return False
            ledger.start_round()
            self._open_groups(ledger)
        elif self.exhausted or ledger.account.undelivered < ledger.rules.batch_groups:
            self._open_groups(ledger)
        if batch := self.next_batch(ledger):
            ledger.deliver(batch)
        elif not self.all_complete(ledger):
            return False
        ledger.end_round()
        return True

    def starved(self, ledger: Ledger) -> bool:
        return not ledger.rounds.open and super().starved(ledger)

    def all_complete(self, ledger: Ledger) -> bool:
        return self.exhausted and super().all_complete(ledger)

    def floor(self, ledger: Ledger) -> int:
        """Least policy step of a worker that may generate for the next batch: the batch's own, or with
        `schedule.overlap` one less."""
        return max(0, ledger.steps.next - 1) if self.section.overlap else ledger.steps.next

    def hands_out(self, ledger: Ledger, step: int) -> bool:
        return ledger.rounds.open and step >= self.floor(ledger)

    def _settle(self, ledger: Ledger) -> bool:
        """Whether every generation lease of the last round has been handed back; if so, and without partial rollout,
        the unfinished groups are discarded."""
        if ledger.leases.generating:
            return False
        if not self.section.partial_rollout:
            for group in ledger.open_groups():
                if group.unfinished:
                    ledger.discard(group, "aborted")
        return True

    def _open_groups(self, ledger: Ledger) -> None:
        for _ in range(self._groups_to_open(ledger)):
            floor = self.floor(ledger)
            prompt = ledger.next_prompt(self.prompts)
            self.exhausted = prompt is None
            if prompt is None or not ledger.bound.survives(ledger.steps.next, floor):
                return
            epoch, row, tokens = prompt
            ledger.open_group(epoch, row, floor, prompt=tokens)

    def _groups_to_open(self, ledger: Ledger) -> int:
        wanted, at_once = ledger.rules.batch_groups, self.section.groups_per_round
        if at_once >= wanted:
            return at_once - ledger.account.undelivered
        return 0 if ledger.account.counts[GroupState.OPEN] else min(at_once, wanted - len(ledger.ready))


class ActivePartialSchedule(RoundSchedule):
    """The schedule `april`: active partial rollouts (arXiv 2509.18521)."""

    dial = Dial("over_sampling_batch_size")

    @classmethod
    def variants(cls, section: ScheduleSection) -> dict[str, Mapping[str, Any]]:
        opened = {"over_sampling_batch_size": section.over_sampled}
        name = f"N' = {section.over_sampled}"
        return {
            name: opened,
            f"{name}, work dropped": opened | {"partial_rollout": False},
            f"{name}, overlap": opened | {"overlap": True},
        }


class SyncSchedule(RoundSchedule):
    """The synchronous baseline, schedule `sync`: a round opens N groups and waits for all of them."""

    @classmethod
    def check(cls, section: ScheduleSection) -> None:
        if section.groups_per_round > section.rollout_batch_size:
            able = SCHEDULES.names_where(lambda kind: kind.dial and kind.dial.key == "over_sampling_batch_size")
            refuse(
                "schedule.over_sampling_batch_size",
                section.groups_per_round,
                f"over-samples N = {section.rollout_batch_size}, which schedule.kind = {section.kind!r} never does",
                f"use schedule.kind = {able} or leave the key out",
            )
        super().check(section)

    @classmethod
    def variants(cls, section: ScheduleSection) -> dict[str, Mapping[str, Any]]:
        """Settings that `april simulate` compares: one batch of N groups per round, and one of as many groups as
        over-sampling would open."""
        each = (section.rollout_batch_size, section.over_sampled)
        return {f"N = {groups}": {"rollout_batch_size": groups} for groups in each}
