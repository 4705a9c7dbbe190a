"""What a schedule decides over a ledger, what April asks about one before it drives any, and the order in which waiting
samples are handed out.

Which schedule drives a ledger may change when the broker starts: all of them keep the ledger's staleness bound, and
each takes the ledger as it finds it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.prompts import Prompts
from april.broker.ledger.samples import Group, GroupState, Sample
from april.broker.schedules import SCHEDULES
from april.config import ConfigError, ScheduleSection

KINDS_OWN = ("over_sampling_batch_size", "partial_rollout", "overlap", "in_flight")
"""keys of [schedule] that mean something to some schedules; what the others say holds for all"""


@dataclass(frozen=True)
class Dial:
    """The key that says how much a schedule has on the way at a time: what `auto` and `april tune` choose."""

    key: str
    """of [schedule]"""
    counts_samples: bool = False
    """otherwise groups"""

    def of_one_batch(self, section: ScheduleSection) -> int:
        """What the key is where as much is on the way as one batch takes."""
        return section.rollout_batch_size * (section.n_samples_per_prompt if self.counts_samples else 1)


def reads(key: str) -> Callable[["type[Schedule]"], bool]:
    """Whether a schedule reads a key of [schedule]."""
    return lambda kind: key in kind.reads


class Schedule:
    """Drives a ledger.

    while True:
        messages = drain()                    # leases, chunks, scores, lost workers -> ledger
        while schedule.advance(ledger):       # a round ended:
            ...                               # broadcast abort with ledger.watermark
        sample = choose_sample(schedule, ledger, worker_step)
    """

    # --- what is asked about its class --------------------------------------------------------------------------

    by_rounds: ClassVar[bool] = True
    """whether generation stops at the end of a round, until the next begins"""
    dial: ClassVar[Dial | None] = None
    """none: there is nothing to choose"""
    reads: ClassVar[Collection[str]] = ()
    """those of `KINDS_OWN` that mean something to it; the others are refused"""

    @classmethod
    def check(cls, section: ScheduleSection) -> None:
        """Refuse what it cannot do. Raises ConfigError."""
        default = ScheduleSection()
        for key in KINDS_OWN:
            value = getattr(section, key)
            if key not in cls.reads and value != getattr(default, key):
                able = SCHEDULES.those(reads(key))
                instead = f", or set schedule.{cls.dial.key}" if cls.dial else ""
                raise ConfigError(
                    f"key 'schedule.{key}' = {value!r} is for schedule.kind = {able}, not {section.kind!r}; "
                    f"leave it out{instead}"
                )

    @classmethod
    def samples_in_flight(cls, section: ScheduleSection) -> int:
        """Training samples that it has in generation at a time, at most."""
        return section.most_in_flight

    @classmethod
    def groups_outlive_a_round(cls, section: ScheduleSection) -> bool:
        """Whether a batch is trained while other groups are unfinished."""
        return True

    @classmethod
    def in_reach(cls, section: ScheduleSection) -> tuple[int, int]:
        """(batches, groups in each) that may pass beside the longest response: what caps the throughput."""
        if cls.groups_outlive_a_round(section):
            return section.batches_in_reach, section.rollout_batch_size
        return 1, section.groups_per_round

    @classmethod
    def variants(cls, section: ScheduleSection) -> dict[str, Mapping[str, Any]]:
        """What `april simulate` compares of it: keys of [schedule] beside N, n and S, by what the line is called behind
        the kind; `section__key` is one of another section of the scenario."""
        return {"": {key: getattr(section, key) for key in cls.reads}}

    # --- what it decides ----------------------------------------------------------------------------------------

    def __init__(self, section: ScheduleSection, prompts: Prompts):
        self.section = section
        self.prompts = prompts

    @classmethod
    def from_config(cls, section: ScheduleSection, prompts: Prompts) -> "Schedule":
        return cls(section, prompts)

    def advance(self, ledger: Ledger) -> bool:
        """Start or end rounds, open groups and deliver a batch as the ledger permits; True when a round ended."""
        raise NotImplementedError

    def finished(self, ledger: Ledger) -> bool:
        """No batch will follow the ones that were delivered."""
        return ledger.next_step >= self.section.max_steps or self.starved(ledger)

    def starved(self, ledger: Ledger) -> bool:
        """Too few groups are complete for another batch, and no more will be."""
        least = 1 if self.section.last_batch == "train" else ledger.rules.batch_groups
        return len(ledger.ready) < least and self.all_complete(ledger)

    def all_complete(self, ledger: Ledger) -> bool:
        """Every prompt has been drawn, and its group is no longer open; none will follow."""
        return not ledger.rules.submitted and self._none_is_left(ledger)

    def wants_prompts(self, ledger: Ledger) -> bool:
        """Without further prompts from the trainer there is no batch."""
        short = ledger.rules.submitted and len(ledger.ready) < ledger.rules.batch_groups
        return short and not self.finished(ledger) and self._none_is_left(ledger)

    def _none_is_left(self, ledger: Ledger) -> bool:
        return ledger.counts[GroupState.OPEN] == 0 and ledger.next_prompt(self.prompts) is None

    def next_batch(self, ledger: Ledger) -> list[Group] | None:
        """N groups to deliver, or those that are left because no more will come; None while more must be complete."""
        if batch := ledger.choose_batch(ledger.rules.batch_groups):
            return batch
        if self.section.last_batch == "train" and self.all_complete(ledger):
            return ledger.choose_batch(len(ledger.ready))
        return None

    def floor(self, ledger: Ledger) -> int:
        """The policy step below which a worker gets nothing for the batch being made."""
        raise NotImplementedError

    def hands_out(self, ledger: Ledger, step: int) -> bool:
        """Whether a worker at policy step `step` gets anything for training now."""
        raise NotImplementedError

    def urgent_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """What must be in the batch that is being made, lest it be overdue; for a worker at policy step `step`."""
        if not self.hands_out(ledger, step):
            return None
        return ledger.queue.take_due(step, opened_by=ledger.next_step - ledger.rules.max_staleness)

    def next_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """What a worker at policy step `step` generates next: of started groups first, then of fresh ones."""
        if not self.hands_out(ledger, step):
            return None
        return ledger.queue.take_started(step) or ledger.queue.take_fresh(step)

    def next_for_agent(self, ledger: Ledger) -> Sample | None:
        """A training sample for an agents process that has room for another session."""
        return ledger.queue.take_for_agent(evaluation=False)


def choose_sample(schedule: Schedule, ledger: Ledger, step: int, evaluation_share_left: bool = True) -> Sample | None:
    """What a worker at policy step `step` that has room is given next, to be leased at once.

    What only lacks its score comes first, since it costs no slot, unless scorers are there for that; then what a
    deadline needs, evaluation up to its share of the worker's slots, and training. Evaluation beyond its share gets
    what would otherwise stay idle.
    """
    return (
        (None if ledger.rules.scored_apart else ledger.queue.take_scoring())
        or schedule.urgent_sample(ledger, step)
        or (ledger.queue.take_evaluation(step) if evaluation_share_left else None)
        or schedule.next_sample(ledger, step)
        or ledger.queue.take_evaluation(step)
    )
