"""Memory that a run needs on each accelerator, by purpose, and the keys that make it fit."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from april.config import Config, ConfigError
from april.config.advantages import needs_critic
from april.config.checks import check
from april.config.training import LoraSection
from april.launch.memory import (
    BLOCK_LOGITS,
    CONTEXT_BYTES,
    HEAD_BYTES,
    LOGIT_BYTES,
    VALUE_BYTES,
    WEIGHT_BYTES,
    divide,
    gathered_bytes,
    has_reference,
    pass_tokens,
    read_shape,
    teacher_bytes,
)
from april.learner.backends import BACKENDS
from april.learner.optimizers import SMALLER, WHOLE_MATRICES, state_bytes
from april.util.text import format_bytes

if TYPE_CHECKING:
    from april.learner.footprint import Footprint

ADAPTER_RANK = 32
"""Rank of the adapter that is suggested."""


@dataclass(frozen=True)
class Change:
    """A change of the configuration that saves memory."""

    keys: Mapping[str, Any]
    """New values, by key."""
    cost: float
    """Number by which changes are ordered, the cheapest first: changes that slow a step down or round the optimizer's
    moments have the lowest ones, then come those that round weights, then those that need more accelerators."""
    price: str
    """Price of the change in words."""

    def on(self, config: Config) -> Config:
        tree: dict[str, dict[str, Any]] = {}
        for key, value in self.keys.items():
            section, _, name = key.partition(".")
            tree.setdefault(section, {})[name] = value
        sections = {name: getattr(config, name).model_copy(update=values) for name, values in tree.items()}
        return config.model_copy(update=sections)

    def __str__(self) -> str:
        return ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.keys.items()) + f" ({self.price})"


@dataclass(frozen=True)
class Needs:
    """Bytes that a run takes on an accelerator of the learner, and on one of an engine, by purpose."""

    learner: Mapping[str, float]
    engine: Mapping[str, float]
    shared: bool
    """Whether learner and engines are on the same accelerators."""
    time_shared: bool
    """Whether learner and engines use the accelerators' memory in turn."""

    @property
    def least(self) -> float:
        """Least memory that each accelerator must have for the run to work (bytes): an engine needs a cache for one
        response."""
        learner, engine = sum(self.learner.values()), sum(self.engine.values())
        return learner + engine if self.shared and not self.time_shared else max(learner, engine)


def needs_of(config: Config) -> Needs:
    """Memory that a run takes on its accelerators. Raises ModelError for a model that the learner does not train."""
    section, tokens, ranks = config.learner, pass_tokens(config), config.learner.ranks
    fp32 = section.compute == "fp32"
    sizes = sizes_of(config)
    critics = sizes.model if needs_critic(config) else 0
    outside = max(0, sizes.outside - sizes.vocabulary * sizes.hidden)
    trained, each = sizes.trained + critics, VALUE_BYTES[section.master_weights]
    policy = float(sizes.held_bytes if config.lora.is_set else sizes.model * each)
    logits = min(BLOCK_LOGITS, tokens * sizes.vocabulary)
    kept, head = sizes.kept_bytes, float(sizes.vocabulary * sizes.hidden * HEAD_BYTES + logits * LOGIT_BYTES)
    if section.activation_checkpointing:  # the head is done with before the first layer is computed again
        inputs = 0 if section.activations_on_host else sizes.layers * sizes.hidden * (4 if fp32 else 2)
        kept, head = inputs, max(head, tokens * sizes.largest_bytes)
    learner = {
        "weights": (policy * (2 if has_reference(config) else 1) + critics * each + teacher_bytes(config)) / ranks,
        "gradients": trained * each / ranks,
        "optimizer": trained * state_bytes(section, sizes.matrices / max(1, sizes.trained)) / ranks,
        "gathered layers": gathered_bytes(config, sizes.layer, outside),
        "activations": tokens * kept,
        "head or layer": head,
        "context": float(CONTEXT_BYTES),
    }
    longest, shape = config.longest_prompt_tokens + config.sampling.max_response_tokens, read_shape(config.model.path)
    engine = {
        "weights": sizes.model * WEIGHT_BYTES / config.engine.tensor_ranks,
        "cache": (shape.kv_bytes if shape else 0) * longest / config.engine.tensor_ranks,
        "context": float(CONTEXT_BYTES),
    }
    return Needs(learner, engine, config.devices.share, config.devices.turns)


def sizes_of(config: Config) -> "Footprint":
    section = config.learner
    adapter = config.lora.model_dump_json()
    return cached_sizes(config.model.path, adapter, section.compute != "fp32", section.freeze_vision)


@cache
def cached_sizes(folder: Path, adapter: str, bf16: bool, freeze_vision: bool) -> "Footprint":
    """Sizes (`Footprint`) of the model in `folder` with the adapter of section [lora], which `adapter` is as JSON.
    `bf16`: whether passes are in bfloat16, otherwise in fp32; `freeze_vision`: whether the vision tower is not trained.
    """
    from april.learner.footprint import footprint

    return footprint(folder, LoraSection.model_validate_json(adapter), bf16, freeze_vision=freeze_vision)


def changes(config: Config) -> Iterator[Change]:
    """Changes that would save memory, the cheapest first."""
    section, backend = config.learner, BACKENDS.find(config.learner.backend)
    offloads, sharers = backend.can_offload, sizes_of(config).sharers if backend.divides_rows else 1
    longest = config.longest_prompt_tokens + config.sampling.max_response_tokens
    if section.optimizer in SMALLER and offloads:
        yield Change({"learner.optimizer": SMALLER[section.optimizer]}, 1, "moments are rounded to 8 bits")
    if config.lora.is_set and config.lora.base == "fp32":
        yield Change({"lora.base": "bf16"}, 1, "frozen weights are rounded to 16 bits, if they are not yet")
    if section.microbatch_tokens > longest:
        yield Change({"learner.microbatch_tokens": longest}, 2, "ranks wait for each other")
    for size in (2, 4, 8):
        if section.context_parallel < size <= sharers:
            keys = {"learner.context_parallel": size, "learner.microbatch_tokens": -(-longest // size)}
            yield Change(keys, 2 + size / 8, f"{size} ranks share each sequence")
    if not section.activation_checkpointing and offloads:
        yield Change({"learner.activation_checkpointing": True}, 3, "a third forward pass in each step")
    if not section.activations_on_host and offloads:
        keys = {"learner.activation_checkpointing": True, "learner.activations_on_host": True}
        yield Change(keys, 4.5, "a third forward pass in each step, and inputs of layers cross the bus twice")
    if config.devices.share and not config.devices.turns:
        yield Change({"devices.turns": True}, 4, "nothing is generated while the learner trains")
    if not section.optimizer_on_host and section.optimizer not in WHOLE_MATRICES and offloads:
        yield Change({"learner.optimizer_on_host": True}, 5, "the optimizer's step is made by the processor")
    for factor, cost in ((2, 8), (4, 16), (8, 32)):
        yield Change({"learner.ranks": section.ranks * factor}, cost, f"{factor} times as many accelerators")
    if (
        not config.lora.is_set
        and section.master_weights == "fp32"
        and section.optimizer not in WHOLE_MATRICES
        and offloads
    ):
        yield Change({"learner.master_weights": "bf16"}, 7, "trained weights and gradients are rounded to 16 bits")
    if config.lora.is_set and config.lora.base != "nf4":
        yield Change({"lora.base": "nf4"}, 6, "frozen weights are rounded to 4 bits")
    if not config.lora.is_set and offloads:
        yield Change({"lora.rank": ADAPTER_RANK, "lora.alpha": 2 * ADAPTER_RANK}, 12, "an adapter is trained alone")


def ways_to_fit(config: Config, memory_bytes: float, most: int = 3) -> list[tuple[list[Change], Needs]]:
    """The `most` cheapest sets of changes with which a run fits into accelerators of `memory_bytes`, each with the
    needs of the changed run. No set contains another."""
    found: list[tuple[list[Change], Needs]] = []
    smaller: list[list[tuple[str, Any]]] = []
    offered = list(changes(config))
    sets = [list(chosen) for count in (1, 2, 3, 4) for chosen in combinations(offered, count)]
    for chosen in sorted(sets, key=lambda chosen: sum(change.cost for change in chosen)):
        keys = [item for change in chosen for item in change.keys.items()]
        if len(keys) > len(dict(keys)) or any(set(other) <= set(keys) for other in smaller):
            continue
        changed = config
        for change in chosen:
            changed = change.on(changed)
        try:
            check(changed, inputs=())
        except ConfigError:
            continue
        needs = needs_of(changed)
        if not objection(changed, needs, memory_bytes):
            found.append((chosen, needs))
            smaller.append(keys)
            if len(found) == most:
                break
    return found


def objection(config: Config, needs: Needs, memory_bytes: float) -> str:
    """Reason why a run with these `needs` does not fit into accelerators of `memory_bytes`; empty if it fits. Where
    learner and engine share accelerators, the run also has to pass `divide`, which `april run` calls at its start, and
    which keeps more memory for the engine."""
    if needs.least > memory_bytes:
        return f"{format_bytes(needs.least)} are needed"
    shape = read_shape(config.model.path)
    if config.devices.share and shape:
        try:
            divide(config, shape, memory_bytes)
        except ConfigError as error:
            return f"a start would refuse it: {error}"
    return ""


def describe(config: Config, memory_bytes: float) -> tuple[str, bool]:
    """Memory that a run needs on accelerators of `memory_bytes` and the changes that make it fit, as text; and whether
    it fits as it is."""
    needs = needs_of(config)
    sides = needs.learner, needs.engine
    rows = [line("", "learner", "engine")]
    for name in dict.fromkeys([*needs.learner, *needs.engine]):
        rows.append(line(name, *(format_bytes(side[name]) if name in side else "" for side in sides)))
    rows.append(line("together", *(format_bytes(sum(side.values())) for side in sides)))
    how = "in turns on" if needs.time_shared else "together on" if needs.shared else "each on"
    where = f"learner and engine, {how} an accelerator of {format_bytes(memory_bytes)}"
    if not (why := objection(config, needs, memory_bytes)):
        return "\n".join([*rows, f"{where}: this fits"]), True
    rows.append(f"{where}: this does not fit, {why}")
    if not needs.shared and sum(needs.engine.values()) > memory_bytes:
        rows.append(
            "the engine does not fit: spread a server over more accelerators (engine.server.tp_size of SGLang, "
            "engine.server.tensor_parallel_size of vLLM), or take a smaller model"
        )
        return "\n".join(rows), False
    for chosen, changed in ways_to_fit(config, memory_bytes):
        rows.append(f"  {format_bytes(changed.least)} with " + "; ".join(map(str, chosen)))
    if not rows[-1].startswith(" "):
        rows.append("no change of a key makes it fit: take a smaller model, shorter responses or larger accelerators")
    return "\n".join(rows), False


def line(name: str, learner: str, engine: str) -> str:
    return f"{name:16}{learner:>12}{engine:>12}"
