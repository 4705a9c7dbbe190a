"""Registry of samplers, which choose the prompt that is drawn next; `draws.py` says how."""

from april.util.registry import Registry

SAMPLERS = Registry(
    "schedule.sampler",
    "sampler",
    {name: f"april.broker.samplers.samplers:{name}" for name in ("order", "difficulty", "spread")},
)
