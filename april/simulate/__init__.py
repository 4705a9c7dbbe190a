"""The broker's own ledger and schedules on a virtual clock, over an engine cost model."""
