"""Metrics of a run: what is recorded, and the metric loggers (`operations.sinks`) that receive it."""
