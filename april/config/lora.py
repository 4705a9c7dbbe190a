"""The keys of `[lora]`: an adapter that is trained in place of the model, and which of its layers have a part of it."""

from collections.abc import Iterable

from pydantic import Field

from april.config.section import Section
from april.errors import ConfigError


class LoraSection(Section):
    """Low-rank adapters; `lora.rank = 0` trains all parameters."""

    rank: int = Field(0, ge=0, description="of the adapter that is trained in place of the model; 0: the model is")
    alpha: float = Field(32.0, gt=0, description="what the adapter adds counts alpha / rank times")
    targets: list[str] = Field(
        [], description="layers that have one, by the last part of their names, such as q_proj; none given: all linear"
    )
    embedding: bool = Field(
        False, description="the embedding is trained whole beside the adapter, and the head that is tied to it or not"
    )

    @property
    def is_set(self) -> bool:
        return self.rank > 0

    @property
    def keeps_start(self) -> bool:
        """The starting policy is at hand as long as the adapter is left out: nothing else is trained."""
        return self.is_set and not self.embedding


def adapted(linears: Iterable[str], section: LoraSection) -> list[str]:
    """Those of a model's linear layers, given by name, that have an adapter. Raises ConfigError where a target is none
    of them."""
    by_part: dict[str, list[str]] = {}
    for name in linears:
        by_part.setdefault(name.rpartition(".")[2], []).append(name)
    if unknown := sorted(set(section.targets) - by_part.keys()):
        raise ConfigError(
            f"key 'lora.targets' = {section.targets} names {unknown[0]!r}, which is no linear layer of the model; "
            f"use {', '.join(sorted(by_part)) or 'a model that has some'}"
        )
    return [name for part in section.targets or by_part for name in by_part[part]]


def check_lora(section: LoraSection) -> None:
    if section.targets and not section.is_set:
        raise ConfigError(
            f"key 'lora.targets' = {section.targets} says what has an adapter, and lora.rank = 0 trains none; set "
            "lora.rank, or leave it out"
        )
    if section.embedding and not section.is_set:
        raise ConfigError(
            "key 'lora.embedding' = true trains the embedding beside an adapter, and lora.rank = 0 trains none; set "
            "lora.rank, or leave it out: without one all is trained"
        )
