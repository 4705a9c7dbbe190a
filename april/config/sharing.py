"""What learner and engines cannot be, or do, on the accelerators that they share."""

from typing import Any

from april.config.sections import Config
from april.errors import ConfigError
from april.registry import registry_of


def check_sharing(config: Config) -> None:
    """Refuse what cannot be on the accelerators that another part is on."""
    devices, weights = config.devices, config.weights
    if devices.turns and not devices.share:
        raise ConfigError(
            "key 'devices.turns' = true is for parts that share accelerators, and devices.share = false; set that, or "
            "leave it out"
        )
    if not devices.share:
        if devices.memory_gib is not None:
            raise ConfigError(
                f"key 'devices.memory_gib' = {devices.memory_gib:g} is divided where parts share accelerators, and "
                "devices.share = false; set that, or leave it out"
            )
        return
    if weights.backend == "nccl":
        raise ConfigError(
            f"key 'weights.backend' = {weights.backend!r} cannot be with devices.share = true, since NCCL takes one "
            "rank on each accelerator; use 'gloo', or leave it out"
        )


def check_turns(config: Config, kind: Any, backend: Any) -> None:
    """Refuse what generates while the learner trains, and a learner that cannot leave. `kind` and `backend`: what the
    schedule and the learner's back end say of themselves, None of those that are not imported."""
    if not config.devices.turns:
        return
    mend = "or leave out devices.turns, so that memory is divided"
    if kind and not kind.by_rounds:
        kinds = registry_of("schedule.kind").those(lambda one: one.by_rounds)
        raise ConfigError(
            f"key 'schedule.kind' = {config.schedule.kind!r} generates while the learner trains, and with "
            f"devices.turns = true nothing does; use {kinds}, {mend}"
        )
    if config.schedule.overlap:
        raise ConfigError(
            "key 'schedule.overlap' = true lets the next round start while the learner trains, and with devices.turns "
            f"= true nothing is generated then; leave it out, {mend}"
        )
    if backend and not backend.parks:
        backends = registry_of("learner.backend").those(lambda one: one.parks)
        raise ConfigError(
            f"key 'learner.backend' = {config.learner.backend!r} stays on its accelerator, which devices.turns = true "
            f"gives to the engines; use {backends}, {mend}"
        )


def check_divided(config: Config) -> None:
    """Refuse an engine whose memory cannot be bounded. Its own word is asked for."""
    if not config.devices.share:
        return
    engines = registry_of("worker.engine")
    engine = engines.find(config.worker.engine)
    if not engine.divides_memory:
        raise ConfigError(
            f"key 'devices.share' = true divides the memory of accelerators, and worker.engine = "
            f"{config.worker.engine!r} takes what it finds; use {engines.those(lambda one: one.divides_memory)}, or "
            "accelerators of its own"
        )
    if config.devices.turns and not engine.takes_turns:
        raise ConfigError(
            f"key 'devices.turns' = true has engines let go of their memory, which worker.engine = "
            f"{config.worker.engine!r} does not; use {engines.those(lambda one: one.takes_turns)}, or leave it out"
        )
    if config.engine.url:
        raise ConfigError(
            "key 'devices.share' = true divides memory with servers that are started here, and engine.url names those "
            "of others; leave one of them out"
        )
    if engine.broadcasts_to_servers(config):
        raise ConfigError(
            f"key 'engine.weights' = {config.engine.weights!r} cannot be with devices.share = true: learner and server "
            "would be two ranks on one accelerator; use another way into the server"
        )
