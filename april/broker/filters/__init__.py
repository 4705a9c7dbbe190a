"""Registry of group filters, which discard complete groups before training; `filters.py` defines them."""

from april.util.registry import Registry

FILTERS = Registry("schedule.group_filter", "filter", {"zero_spread": "april.broker.filters.filters:zero_spread"})
