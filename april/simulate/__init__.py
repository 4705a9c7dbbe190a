"""Simulates a run: the broker's own ledger and schedules on a virtual clock, with an engine cost model."""
