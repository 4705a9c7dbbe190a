"""Group filters: which complete groups are discarded before training. Dynamic sampling is one of them.

A filter is a function of a `CompleteGroup` that returns the reason to discard the group, or None to keep it. The key
`schedule.group_filter` names the filters of a run. Filters run in the broker's loop, so they have to be fast.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from april.config import ScheduleSection
from april.config.section import bound
from april.data.groups import has_spread
from april.util.registry import Registry
from april.wire.limits import clip

FILTERS = Registry("schedule.group_filter", "filter", {"zero_spread": "april.broker.filters:zero_spread"})
REASON_CHARACTERS = 40
STATES = frozenset({"open", "ready", "delivered", "trained", "discarded"})
"""Names of the states of groups. A filter must not return one as its reason, as states and discard reasons are counted
under their names in the same table."""


class CompleteGroup(NamedTuple):
    """Input of a group filter: a complete group. Each list has one entry per sample; samples that failed for good are
    left out."""

    rewards: list[float]
    lengths: list[int]
    """Response lengths in tokens, without observations."""
    finish_reasons: list[str]
    details: list[dict[str, float]]
    """Named parts that each sample's reward consists of, as its verifier reports them."""
    accuracies: list[float]
    """Accuracy of each sample: the detail `correct` of its verifier or, without one, the reward before penalties."""


class FilterSample(Protocol):
    """Attributes of a ledger sample that filters read; the reward is None if the sample failed for good."""

    reward: float | None
    finish_reason: str
    details: dict[str, float] | None

    @property
    def sampled_tokens(self) -> int: ...

    @property
    def accuracy(self) -> float: ...


class FilterGroup(Protocol):
    @property
    def samples(self) -> Sequence[FilterSample]: ...


Filter = Callable[[CompleteGroup], str | None]


class FilterFailed(RuntimeError):
    """A filter raised an exception, or returned neither None nor a valid reason; the message names the filter."""


def zero_spread(group: CompleteGroup) -> str | None:
    """Discard groups of equal accuracies, all right or all wrong: dynamic sampling (arXiv 2503.14476, section 3.2)."""
    return None if has_spread(group.accuracies) else "zero_spread"


zero_spread.compares_rewards = True  # type: ignore[attr-defined]


class GroupFilters:
    """The filters of a run, applied in order."""

    def __init__(self, section: ScheduleSection):
        self.filters: list[Filter] = [zero_spread] if section.dynamic_sampling else []
        if section.group_filter:
            self.filters.append(bound(FILTERS.find(section.group_filter), section))
        self.in_a_row = 0
        """Number of groups discarded since the last group that was kept."""
        self.last_reason = ""

    def reason_against(self, group: FilterGroup) -> str:
        """The reason to discard a complete group, from the first filter that returns one; empty if all filters keep the
        group. Raises FilterFailed."""
        done = [(sample, sample.reward) for sample in group.samples if sample.reward is not None]
        facts = CompleteGroup(
            [reward for _, reward in done],
            [sample.sampled_tokens for sample, _ in done],
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
