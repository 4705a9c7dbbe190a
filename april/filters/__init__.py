"""Which complete groups are not worth training; `filters.py` says what a filter is."""

from april.registry import Registry

FILTERS = Registry("schedule.group_filter", "filter", {"zero_spread": "april.filters.filters:zero_spread"})
