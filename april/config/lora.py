"""The keys of `[lora]`: a low-rank adapter that is trained instead of the model, and the layers that it is on."""

from collections.abc import Iterable

from pydantic import Field

from april.config.section import Section
from april.errors import refuse


class LoraSection(Section):
    """A low-rank adapter; `lora.rank = 0` trains all parameters instead."""

    rank: int = Field(
        0,
        ge=0,
        description="Rank of the low-rank adapter that is trained instead of the model; 0: full training. Each "
        "parameter of the adapter takes 12 bytes, and of the model 4 instead of 16; a low rank learns less.",
    )
    alpha: float = Field(
        32.0,
        gt=0,
        description="Scale of the adapter: its output is multiplied by alpha / rank. A high value makes steps "
        "larger, as a learning rate does.",
    )
    targets: list[str] = Field(
        [],
        description="Linear layers that get an adapter, by the last part of their names, such as q_proj; empty: all. "
        "Fewer are faster and learn less.",
    )
    embedding: bool = Field(
        False,
        description="Also train the input embedding and the output head whole. It takes 12 bytes for each of their "
        "parameters, and with a KL term a frozen second copy of the model.",
    )

    @property
    def is_set(self) -> bool:
        return self.rank > 0

    @property
    def base_is_frozen(self) -> bool:
        """Only the adapter is trained: without it the model still is the starting policy, the KL reference."""
        return self.is_set and not self.embedding


def layers_to_adapt(linears: Iterable[str], section: LoraSection) -> list[str]:
    """Names among `linears`, a model's linear layers, that get an adapter. Raises ConfigError for an unknown target."""
    by_part: dict[str, list[str]] = {}
    for name in linears:
        by_part.setdefault(name.rpartition(".")[2], []).append(name)
    if unknown := sorted(set(section.targets) - by_part.keys()):
        refuse(
            "lora.targets",
            section.targets,
            f"names {unknown[0]!r}, which is no linear layer of the model",
            f"use {', '.join(sorted(by_part)) or 'a model that has some'}",
        )
    return [name for part in section.targets or by_part for name in by_part[part]]


def check_lora(section: LoraSection) -> None:
    if section.targets and not section.is_set:
        refuse(
            "lora.targets",
            section.targets,
            "says what has an adapter, and lora.rank = 0 trains none",
            "set lora.rank, or leave it out",
        )
    if section.embedding and not section.is_set:
        refuse(
            "lora.embedding",
            True,
            "trains the embedding beside an adapter, and lora.rank = 0 trains none",
            "set lora.rank, or leave it out: without one all is trained",
        )
