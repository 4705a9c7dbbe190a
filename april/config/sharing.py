"""Checks of `[devices]`: what learner and engines cannot do on accelerators that they share."""

from typing import Any

from april.config.sections import Config
from april.util.errors import refuse
from april.util.registry import registry_of


def check_sharing(config: Config) -> None:
    """Refuse keys that contradict `devices.share`. Raises ConfigError."""
    devices, weights = config.devices, config.weights
    if devices.turns and not devices.share:
        refuse(
            "devices.turns",
            True,
            "is for parts that share accelerators, and devices.share = false",
            "set that, or leave it out",
        )
    if not devices.share:
        if devices.memory_gib is not None:
            refuse(
                "devices.memory_gib",
                devices.memory_gib,
                "is divided where parts share accelerators, and devices.share = false",
                "set that, or leave it out",
            )
        return
    if weights.backend == "nccl":
        refuse(
            "weights.backend",
            weights.backend,
            "cannot be with devices.share = true, since NCCL takes one rank on each accelerator",
            "use 'gloo', or leave it out",
        )


def check_time_sharing(config: Config, kind: Any, backend: Any) -> None:
    """Refuse time sharing (`devices.turns`) with a schedule that generates while the learner trains, and with a learner
    that cannot be offloaded. `kind`, `backend`: registry entries of the schedule and of the training back end; None if
    not imported."""
    if not config.devices.turns:
        return
    fix = "or leave out devices.turns, so that memory is divided"
    if kind and not kind.by_rounds:
        kinds = registry_of("schedule.kind").names_where(lambda kind: kind.by_rounds)
        refuse(
            "schedule.kind",
            config.schedule.kind,
            "generates while the learner trains, and with devices.turns = true nothing does",
            f"use {kinds}, {fix}",
        )
    if config.schedule.overlap:
        refuse(
            "schedule.overlap",
            True,
            "lets the next round start while the learner trains, and with devices.turns = true nothing is "
            "generated then",
            f"leave it out, {fix}",
        )
    if backend and not backend.can_offload:
        backends = registry_of("learner.backend").names_where(lambda backend: backend.can_offload)
        refuse(
            "learner.backend",
            config.learner.backend,
            "stays on its accelerator, which devices.turns = true gives to the engines",
            f"use {backends}, {fix}",
        )


def check_memory_division(config: Config) -> None:
    """Raise ConfigError for `devices.share` with an engine that cannot bound its memory (`limits_memory` of its
    registry entry) or, with `devices.turns`, cannot release it (`shares_time`)."""
    if not config.devices.share:
        return
    engines = registry_of("worker.engine")
    engine = engines.find(config.worker.engine)
    if not engine.limits_memory:
        refuse(
            "devices.share",
            True,
            f"divides the memory of accelerators, and worker.engine = {config.worker.engine!r} takes what it finds",
            f"use {engines.names_where(lambda entry: entry.limits_memory)}, or accelerators of its own",
        )
    if config.devices.turns and not engine.shares_time:
        refuse(
            "devices.turns",
            True,
            f"has engines let go of their memory, which worker.engine = {config.worker.engine!r} does not",
            f"use {engines.names_where(lambda entry: entry.shares_time)}, or leave it out",
        )
    if config.engine.url:
        refuse(
            "devices.share",
            True,
            "divides memory with servers that are started here, and engine.url names those of others",
            "leave one of them out",
        )
    if engine.broadcasts_to_servers(config):
        refuse(
            "engine.weights",
            config.engine.weights,
            "cannot be with devices.share = true: learner and server would be two ranks on one accelerator",
            "use another way into the server",
        )
