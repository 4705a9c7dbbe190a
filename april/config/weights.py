"""Checks of how weights reach the workers (`[weights]`)."""

from typing import Any

from april.config.addresses import check_store_url
from april.config.broker import WeightsSection
from april.config.section import AUTO
from april.config.sections import Config
from april.util.errors import refuse
from april.util.registry import registry_of


def check_snapshots(config: Config) -> None:
    """Refuse keys of weight snapshots if no worker reads snapshots, a `weights.every` that skips versions which workers
    need, and a `weights.folder` that is no usable URL."""
    weights, schedule = config.weights, config.schedule
    check_snapshots_are_read(config)
    if weights.delta == "off" and weights.whole_every != WeightsSection().whole_every:
        refuse(
            "weights.whole_every",
            weights.whole_every,
            "is the interval of whole snapshots among deltas, which weights.delta = 'off' does not write",
            "leave it out, or set weights.delta = 'auto'",
        )
    if "://" in weights.folder:
        check_store_url("weights.folder", weights.folder)
    if weights.every == 1:
        return
    if config.evaluation_sets:
        refuse(
            "weights.every",
            weights.every,
            "leaves out versions, and held-out prompts may be due on each, in any case on the last",
            "set it to 1, or leave out data.eval_path and evaluation.sets",
        )
    schedules = registry_of("schedule.kind")
    if config.is_shipped("schedule.kind") and schedules.find(schedule.kind).by_rounds:
        without_rounds = schedules.names_where(lambda kind: not kind.by_rounds)
        refuse(
            "weights.every",
            weights.every,
            f"leaves out versions, and each round of schedule.kind = {schedule.kind!r} waits for its own",
            f"set it to 1, or schedule.kind = {without_rounds}",
        )
    if weights.every > schedule.max_staleness:
        refuse(
            "weights.every",
            weights.every,
            f"would leave workers with weights older than schedule.max_staleness = {schedule.max_staleness} permits",
            "lower it, or raise schedule.max_staleness",
        )


def check_snapshots_are_read(config: Config) -> None:
    """Refuse keys of snapshots of weights with a shipped transport that writes none."""
    if not config.is_shipped("weights.transport"):
        return
    transports, name = registry_of("weights.transport"), config.weights.transport
    for key, default in {"folder": AUTO, "every": 1, "whole_every": WeightsSection().whole_every}.items():
        value = getattr(config.weights, key)
        if value != default and not transports.find(name).pulls:
            refuse(
                f"weights.{key}",
                value,
                f"is about snapshots of weights, which weights.transport = {name!r} does not write",
                f"leave it out, or use weights.transport = {transports.names_where(lambda one: one.pulls)}",
            )


def check_external_weights(config: Config) -> None:
    """Refuse externally loaded weights (`weights.transport`) with servers that the external trainer cannot reach."""
    if not config.is_shipped("weights.transport"):
        return
    if registry_of("weights.transport").find(config.weights.transport).carries_weights:
        return
    if config.weights.delta != "off":
        refuse(
            "weights.delta",
            config.weights.delta,
            f"is how weights travel, which weights.transport = {config.weights.transport!r} leaves to others",
            "leave it out, or use another transport",
        )
    engines = registry_of("worker.engine")
    if not engines.find(config.worker.engine).accepts_external_weights:
        refuse(
            "weights.transport",
            config.weights.transport,
            f"leaves it to others to load weights, who cannot reach those of worker.engine = {config.worker.engine!r}",
            f"use {engines.names_where(lambda one: one.accepts_external_weights)}",
        )
    if not config.engine.url:
        refuse(
            "weights.transport",
            config.weights.transport,
            "leaves it to others to load weights, who do not know the servers that a worker starts",
            "give theirs in engine.url",
        )
    if config.engine.pause != "abort":
        refuse(
            "engine.pause", config.engine.pause, "keeps requests in servers whose weights others change", "use 'abort'"
        )


def check_transport(config: Config, engine: Any) -> None:
    """Refuse a transport that the engine's inference servers cannot join, or one without forwarding from worker to
    worker if `weights.channel_size` asks for chains of workers. `engine`: the engine's registry entry."""
    transports = registry_of("weights.transport")
    check_on_device(config, engine)
    if config.weights.channel_size > 1 and not transports.find(config.weights.transport).forwards:
        refuse(
            "weights.channel_size",
            config.weights.channel_size,
            f"has workers forward weights, which weights.transport = {config.weights.transport!r} does not",
            f"leave it out, or use {transports.names_where(lambda transport: transport.forwards)}",
        )
    if engine.broadcasts_to_servers(config) and not transports.find(config.weights.transport).takes_servers:
        refuse(
            "weights.transport",
            config.weights.transport,
            f"takes no servers into its channels, which engine.weights = {config.engine.weights!r} wants",
            f"use {transports.names_where(lambda transport: transport.takes_servers)}, or another engine.weights",
        )


def check_on_device(config: Config, engine: Any) -> None:
    """Refuse weights that stay on an accelerator (`weights.transport`) unless one rank of the learner and one engine,
    in its worker's process, use it at the same time, and all weights are sent."""
    transport = config.shipped_part("weights.transport")
    if transport is None or transport.device == "cpu":
        return
    engines, transports = registry_of("worker.engine"), registry_of("weights.transport")
    in_process = f"use {engines.names_where(lambda one: one.in_process)}"
    on_host = transports.names_where(lambda one: one.device == "cpu" and one.carries_weights and not one.pulls)
    for key, value, is_met, problem, fix in (
        ("devices.share", config.devices.share, config.devices.share, "gives the learner another one", "set it"),
        ("devices.turns", config.devices.turns, not config.devices.turns, "empties it in turns", "leave it out"),
        ("learner.ranks", config.learner.ranks, config.learner.ranks == 1, "divides the weights", "set 1"),
        ("worker.count", config.worker.count, config.worker.count == 1, "has workers on others", "set 1"),
        ("worker.engine", config.worker.engine, engine.in_process, "has its weights in a server", in_process),
        ("weights.delta", config.weights.delta, config.weights.delta == "off", "needs the host", "leave it out"),
        ("lora.rank", config.lora.rank, not config.lora.is_set, "merges adapters on the host", "leave it out"),
    ):
        if not is_met:
            refuse(
                key,
                value,
                f"{problem}, and weights.transport = {config.weights.transport!r} hands weights over on the "
                "accelerator that learner and engine share",
                f"{fix}, or use weights.transport = {on_host}",
            )
