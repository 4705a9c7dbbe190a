"""Which complete groups are not worth training: dynamic sampling, and filters of one's own.

A filter is a function of a `CompleteGroup` that returns the reason to discard it, or None to keep it. It is named in
`schedule.group_filter` as package.module:function and runs in the broker's loop, so that it has to be quick.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

from april.broker.samples import Group, GroupState, SampleState
from april.config import ConfigError, ScheduleSection
from april.limits import clip
from april.spread import has_spread

REASON_CHARACTERS = 40


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


Filter = Callable[[CompleteGroup], str | None]


class FilterFailed(RuntimeError):
    """A filter that raised or gave no reason; the text says which."""


def zero_spread(group: CompleteGroup) -> str | None:
    """All samples right, or all wrong, whatever penalties add (dynamic sampling, arXiv 2503.14476, section 3.2)."""
    return None if has_spread(group.accuracies) else "zero_spread"


def find_filter(name: str) -> Filter:
    """Raises ConfigError for a name that leads nowhere."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"key 'schedule.group_filter' = {name!r} cannot be found ({error}); give it as package.module:function"
        ) from None
    return found


class GroupFilters:
    """The filters of a run, one after the other."""

    def __init__(self, section: ScheduleSection):
        self.filters = [zero_spread] if section.dynamic_sampling else []
        if section.group_filter:
            self.filters.append(find_filter(section.group_filter))
        self.in_a_row = 0
        """groups that were discarded since one was kept"""
        self.last_reason = ""

    def reason_against(self, group: Group) -> str:
        """Why a complete group is to be discarded; empty to keep it. Raises FilterFailed."""
        done = [sample for sample in group.samples if sample.state is SampleState.DONE]
        facts = CompleteGroup(
            [sample.reward for sample in done],
            [sample.sampled for sample in done],
            [sample.finish_reason for sample in done],
            [sample.details or {} for sample in done],
            [sample.accuracy for sample in done],
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
    if reason is not None and (not isinstance(reason, str) or not reason or reason in set(GroupState)):
        raise FilterFailed(f"the filter {name} returned {reason!r}, which is neither None nor a reason of its own")
    return clip(reason or "", REASON_CHARACTERS)
