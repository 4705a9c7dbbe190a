"""Which complete groups are not worth training: dynamic sampling, and filters of one's own.

A filter is a function of a `CompleteGroup` that returns the reason to discard it, or None to keep it. It is named in
`schedule.group_filter` and runs in the broker's loop, so that it has to be quick.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from april.config import ScheduleSection
from april.filters import FILTERS
from april.filters.spread import has_spread
from april.wire.limits import clip

REASON_CHARACTERS = 40
STATES = frozenset({"open", "ready", "delivered", "trained", "discarded"})
"""of a group, which no reason may be mistaken for"""


class CompleteGroup(NamedTuple):
    """What a filter sees of a group, sample by sample; those that died are left out."""

    rewards: list[float]
    lengths: list[int]
    """response tokens, without observations"""
    finish_reasons: list[str]
    details: list[dict[str, float]]
    """what the rewards are made of"""
    accuracies: list[float]
    """what verifiers call `correct`, or else the rewards before penalties"""


class Sample(Protocol):
    """What is read of one of the ledger's, which has a reward unless it died."""

    reward: float | None
    finish_reason: str
    details: dict[str, float] | None

    @property
    def sampled(self) -> int: ...

    @property
    def accuracy(self) -> float: ...


class Group(Protocol):
    @property
    def samples(self) -> Sequence[Sample]: ...


Filter = Callable[[CompleteGroup], str | None]


class FilterFailed(RuntimeError):
    """A filter that raised or gave no reason; the text says which."""


def zero_spread(group: CompleteGroup) -> str | None:
    """All samples right, or all wrong, whatever penalties add (dynamic sampling, arXiv 2503.14476, section 3.2)."""
    return None if has_spread(group.accuracies) else "zero_spread"


class GroupFilters:
    """The filters of a run, one after the other."""

    def __init__(self, section: ScheduleSection):
        self.filters: list[Filter] = [zero_spread] if section.dynamic_sampling else []
        if section.group_filter:
            self.filters.append(FILTERS.find(section.group_filter))
        self.in_a_row = 0
        """groups that were discarded since one was kept"""
        self.last_reason = ""

    def reason_against(self, group: Group) -> str:
        """Why a complete group is to be discarded; empty to keep it. Raises FilterFailed."""
        done = [(sample, sample.reward) for sample in group.samples if sample.reward is not None]
        facts = CompleteGroup(
            [reward for _, reward in done],
            [sample.sampled for sample, _ in done],
            [sample.finish_reason for sample, _ in done],
            [sample.details or {} for sample, _ in done],
            [sample.accuracy for sample, _ in done],
        )
        reason = next(filter(None, (ask(function, facts) for function in self.filters)), "")
        self.in_a_row = self.in_a_row + 1 if reason else 0
        self.last_reason = reason or self.last_reason
        return reason


def ask(function: Filter, group: CompleteGroup) -> str:
    name = getattr(function, "__name__", repr(function))
    try:
        reason = function(group)
    except Exception as error:
        raise FilterFailed(f"the filter {name} failed: {type(error).__name__}: {error}") from error
    if reason is not None and (not isinstance(reason, str) or not reason or reason in STATES):
        raise FilterFailed(f"the filter {name} returned {reason!r}, which is neither None nor a reason of its own")
    return clip(reason or "", REASON_CHARACTERS)
