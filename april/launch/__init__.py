"""Starts and supervises the parts of a run. `target.py` has the interface of launch targets."""

from april.util.registry import Registry

TARGETS = Registry(
    "run.target", "launch target", {"local": "april.launch.target:LocalTarget"}, base="april.launch.target:Target"
)
