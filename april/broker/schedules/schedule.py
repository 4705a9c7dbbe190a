"""The base class of schedules, and the order in which waiting samples are handed out.

The schedule may change at a restart of the broker: every schedule keeps the ledger's staleness bound and can take over
a ledger in any state.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Prompts
from april.broker.ledger.samples import Group, GroupState, Sample
from april.broker.schedules import SCHEDULES
from april.config import ScheduleSection
from april.util.errors import ConfigError, refuse
from april.wire.message import Version

KIND_SPECIFIC_KEYS = ("over_sampling_batch_size", "partial_rollout", "overlap", "in_flight")
"""Keys of [schedule] that only some schedules read; all other keys apply to every schedule."""


LEDGER_ATTRIBUTES = frozenset((
    "rules", "steps", "rounds", "ready", "account", "leases", "bound", "queue", "open_groups", "next_prompt", "push",
    "start_round", "end_round", "open_group", "discard", "choose_batch", "deliver",
))  # fmt: skip
"""Attributes of the ledger that a schedule may use; `docs/extending.md` says what each of them is for."""
ROUNDS_WITHOUT_BATCH = 50
"""Number of rounds in a row, ended by a schedule without a batch and with no message handled in between, at which the
schedule has failed."""


class ScheduleFailed(ConfigError):
    """A schedule that raised an exception, or with which a run cannot go on. The text names the schedule."""


@dataclass(frozen=True)
class Dial:
    """The key of [schedule] that sets how many samples or groups a schedule generates at a time; `auto` and `april
    tune` choose its value."""

    key: str
    """Name of the key in [schedule]."""
    counts_samples: bool = False
    """Whether the key's value is a number of samples; otherwise a number of groups."""

    def one_batch_value(self, section: ScheduleSection) -> int:
        """Value of the key with which exactly one batch is in generation."""
        return section.rollout_batch_size * (section.n_samples_per_prompt if self.counts_samples else 1)


def reads(key: str) -> Callable[["type[Schedule]"], bool]:
    """Predicate on schedule classes: whether a schedule reads the given key of [schedule]."""
    return lambda kind: key in kind.reads


class Schedule:
    """Drives a ledger: opens groups, delivers batches, and chooses the next sample for a worker.

    while True:
        messages = drain()                            # leases, chunks, scores, lost workers -> ledger
        for _ in ended_rounds(schedule, ledger):      # calls schedule.advance
            ...                                       # broadcast abort with ledger.rounds.watermark
        sample = choose_sample(schedule, ledger, worker_version)      # None: no sample waits

    Of the ledger, a schedule may use what `LEDGER_ATTRIBUTES` names.
    """

    # --- properties of the kind ---------------------------------------------------------------------------------

    by_rounds: ClassVar[bool] = True
    """Whether generation stops at the end of a round until the next round begins."""
    dial: ClassVar[Dial | None] = None
    """The key that sets how much the schedule generates at a time; None if it has no such key."""
    reads: ClassVar[Collection[str]] = ()
    """Names of the `KIND_SPECIFIC_KEYS` that the schedule reads; the other ones are refused."""

    @classmethod
    def check(cls, section: ScheduleSection) -> None:
        """Raises ConfigError for keys or values that the schedule cannot use."""
        default = ScheduleSection()
        for key in KIND_SPECIFIC_KEYS:
            value = getattr(section, key)
            if key not in cls.reads and value != getattr(default, key):
                able = SCHEDULES.names_where(reads(key))
                instead = f", or set schedule.{cls.dial.key}" if cls.dial else ""
                refuse(
                    f"schedule.{key}",
                    value,
                    f"is for schedule.kind = {able}, not {section.kind!r}",
                    f"leave it out{instead}",
                )

    @classmethod
    def samples_in_flight(cls, section: ScheduleSection) -> int:
        """Most training samples in generation at a time."""
        return section.most_in_flight

    @classmethod
    def groups_outlive_a_round(cls, section: ScheduleSection) -> bool:
        """Whether groups may still be unfinished when a batch is complete, so that their tokens can be stale once
        trained."""
        return True

    @classmethod
    def in_reach(cls, section: ScheduleSection) -> tuple[int, int]:
        """(number of batches, groups in each batch) that can be trained while the longest response is generated. Their
        product limits the throughput."""
        if cls.groups_outlive_a_round(section):
            return section.batches_in_reach, section.rollout_batch_size
        return 1, section.groups_per_round

    @classmethod
    def variants(cls, section: ScheduleSection) -> dict[str, Mapping[str, Any]]:
        """Settings that `april simulate` compares, by label: keys of [schedule] and their values, apart from batch
        size, group size and staleness.

        A key `section__key` belongs to another section of the scenario.
        """
        return {"": {key: getattr(section, key) for key in cls.reads}}

    # --- decisions ----------------------------------------------------------------------------------------------

    def __init__(self, section: ScheduleSection, prompts: Prompts):
        self.section = section
        self.prompts = prompts

    @classmethod
    def from_config(cls, section: ScheduleSection, prompts: Prompts) -> "Schedule":
        return cls(section, prompts)

    def advance(self, ledger: Ledger) -> bool:
        """Start or end rounds (a round generates the groups of one batch), open groups and deliver a batch, each as
        far as the ledger permits; returns True when a round ended."""
        raise NotImplementedError

    def finished(self, ledger: Ledger) -> bool:
        """Whether no further batch will be delivered."""
        return ledger.steps.next >= self.section.max_steps or self.starved(ledger)

    def starved(self, ledger: Ledger) -> bool:
        """Whether too few groups are complete for another batch and no more will complete."""
        least = 1 if self.section.last_batch == "train" else ledger.rules.batch_groups
        return len(ledger.ready) < least and self.all_complete(ledger)

    def all_complete(self, ledger: Ledger) -> bool:
        """Whether every prompt has been drawn and every group is complete."""
        return not ledger.rules.submitted and self.has_no_work(ledger)

    def wants_prompts(self, ledger: Ledger) -> bool:
        """Whether the next batch needs further prompts from the trainer."""
        short = ledger.rules.submitted and len(ledger.ready) < ledger.rules.batch_groups
        return short and not self.finished(ledger) and self.has_no_work(ledger)

    def has_no_work(self, ledger: Ledger) -> bool:
        """Whether every group is complete and no prompt is left to draw, unless the trainer submits more."""
        return ledger.account.counts[GroupState.OPEN] == 0 and ledger.next_prompt(self.prompts) is None

    def next_batch(self, ledger: Ledger) -> list[Group] | None:
        """The groups of the next batch: as many as a batch has, or the remaining ones if no more will come; None while
        more are needed."""
        if batch := ledger.choose_batch(ledger.rules.batch_groups):
            return batch
        if self.section.last_batch == "train" and self.all_complete(ledger):
            return ledger.choose_batch(len(ledger.ready))
        return None

    def floor(self, ledger: Ledger) -> int:
        """Least policy step of the weights of a worker that may generate for the next batch."""
        raise NotImplementedError

    def hands_out(self, ledger: Ledger, step: int) -> bool:
        """Whether a worker at policy step `step` may be given training samples now."""
        raise NotImplementedError

    def urgent_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """A sample, for a worker at policy step `step`, of a group whose last permitted batch is the next one; None if
        none waits."""
        if not self.hands_out(ledger, step):
            return None
        return ledger.queue.take_due(step, opened_by=ledger.steps.next - ledger.rules.max_staleness)

    def next_sample(self, ledger: Ledger, step: int) -> Sample | None:
        """The next sample for a worker at policy step `step`: of started groups first, then of fresh ones."""
        if not self.hands_out(ledger, step):
            return None
        return ledger.queue.take_started(step) or ledger.queue.take_fresh(step)

    def next_for_agent(self, ledger: Ledger) -> Sample | None:
        """A training sample for an agents process that has room for another session; None if there is none."""
        return ledger.queue.take_for_agent(evaluation=False)


def ended_rounds(schedule: Schedule, ledger: Ledger) -> Iterator[int]:
    """Advance a schedule until no round ends; yields each ended round's number. Raises ScheduleFailed if
    `ROUNDS_WITHOUT_BATCH` rounds in a row end without a batch."""
    without_batch, next_step = 0, ledger.steps.next
    while schedule.advance(ledger):
        yield ledger.rounds.number
        without_batch, next_step = without_batch + 1 if ledger.steps.next == next_step else 0, ledger.steps.next
        if without_batch == ROUNDS_WITHOUT_BATCH:
            name = type(schedule).__name__
            raise ScheduleFailed(f"schedule {name}: rounds end one after the other, and nothing happens in them")


def choose_sample(
    schedule: Schedule, ledger: Ledger, version: Version, evaluation_share_left: bool = True
) -> Sample | None:
    """The next sample for a worker with a free slot and weights of `version`, to be leased at once; None if none waits.

    The order: samples that only lack a score, which take no slot, unless scorers score them; samples that the next
    batch needs (`urgent_sample`); evaluation samples, if they have not taken up their share of the worker's slots
    (`evaluation_share_left`); training samples; evaluation samples beyond their share, in slots that would stay idle.
    Evaluation samples are for workers with the evaluated version alone.
    """
    step, evaluates = version.step, ledger.may_evaluate(version)
    return (
        (None if ledger.rules.scored_apart else ledger.queue.take_scoring())
        or schedule.urgent_sample(ledger, step)
        or (ledger.queue.take_evaluation(step) if evaluates and evaluation_share_left else None)
        or schedule.next_sample(ledger, step)
        or (ledger.queue.take_evaluation(step) if evaluates else None)
    )
