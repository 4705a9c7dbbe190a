"""Metrics of a run: what is recorded, and the sinks that receive it."""
