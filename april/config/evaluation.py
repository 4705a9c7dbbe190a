"""The keys of `[evaluation]`: held-out prompts that are sampled beside training, in one set, or in several by name."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from april.config.data import DataSection, Mapping, SourceSection
from april.config.section import Section
from april.errors import ConfigError

HELD_OUT = "heldout"
"""the set of `data.eval_path`"""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
DRAWING = ("prompts", "samples", "temperature", "top_k", "top_p")
"""keys of [evaluation] that a set may have of its own"""


class EvaluationSetSection(Section):
    path: Path = Field(description="JSONL, JSON, Parquet or Arrow file, or a folder of them")
    mapping: Mapping | None = Field(None, description="fields of a published dataset; none: data.mapping")
    prompt_key: str | None = Field(None, description="row key of the prompt; none: the mapping's")
    label_key: str | None = Field(None, description="row key of the reference answer; none: the mapping's")
    reward: str | None = Field(None, description="verifier of all its rows; none: data.reward")
    prompts: int | None = Field(None, ge=1, description="its first ones that are used; none: evaluation.prompts")
    samples: int | None = Field(None, ge=1, le=1024, description="of each prompt; none: evaluation.samples")
    temperature: float | None = Field(None, ge=0, description="0 is greedy; none: evaluation.temperature")
    top_k: int | None = Field(None, ge=0, description="tokens kept, 0: all; none: evaluation.top_k")
    top_p: float | None = Field(None, gt=0, le=1, description="mass that the kept ones reach; none: evaluation.top_p")


class EvaluationSection(Section):
    every: int = Field(0, ge=0, description="steps between evaluations; 0: at the start and at the end only")
    prompts: int = Field(256, ge=1, description="held-out prompts, the first ones of the file")
    samples: int = Field(1, ge=1, le=1024, description="k: samples of each, for mean@k and pass@k")
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="tokens kept of the distribution, the likeliest, 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="mass that the kept ones reach")
    share: float = Field(0.5, gt=0, le=1, description="largest share of a worker's slots")
    sets: dict[str, EvaluationSetSection] = Field(
        {}, description="further sets of held-out prompts by name, as [evaluation.sets.NAME]"
    )
    best: str = Field(
        "",
        description="set by whose accuracy the best checkpoint is kept and exported: a name of evaluation.sets, or "
        "heldout for data.eval_path; empty: none is",
    )

    @field_validator("sets")
    @classmethod
    def are_names(cls, sets: dict[str, EvaluationSetSection]) -> dict[str, EvaluationSetSection]:
        for name in sets:
            if not NAME.fullmatch(name) or name == HELD_OUT:
                raise PydanticCustomError(
                    "name_of_a_set",
                    "should have names of up to 64 letters, digits, full stops, - and _, and none called "
                    f"{HELD_OUT}, which is that of data.eval_path",
                )
        return sets


@dataclass(frozen=True)
class EvaluationSet:
    """What is asked, and how answers are drawn."""

    number: int
    """by which the journal knows it: 0 for `data.eval_path`, the others from 1 on"""
    name: str
    key: str
    """section of the configuration that describes it"""
    source: SourceSection
    prompts: int
    samples: int
    temperature: float
    top_k: int
    top_p: float


def evaluation_sets(evaluation: EvaluationSection, data: DataSection) -> list[EvaluationSet]:
    common = {key: getattr(evaluation, key) for key in DRAWING}
    found = [EvaluationSet(0, HELD_OUT, "evaluation", source, **common) for source in data.eval_sources]
    for number, (name, section) in enumerate(evaluation.sets.items(), 1):
        fields = {key: getattr(section, key) for key in ("path", "mapping", "prompt_key", "label_key", "reward")}
        own = {key: value for key in DRAWING if (value := getattr(section, key)) is not None}
        source = SourceSection(**fields).with_defaults(data)
        found.append(EvaluationSet(number, name, f"evaluation.sets.{name}", source, **common | own))
    return found


def check_evaluation(evaluation: EvaluationSection, sets: Iterable[EvaluationSet]) -> None:
    for one in sets:
        if one.samples > 1 and one.temperature == 0:
            raise ConfigError(
                f"key '{one.key}.samples' = {one.samples} asks for greedy samples, which are all the same; "
                f"set {one.key}.temperature above 0 or use 1"
            )
    if not evaluation.best:
        return
    names = [one.name for one in sets]
    if evaluation.best not in names:
        known = f"use {' or '.join(map(repr, names))}" if names else "set data.eval_path or evaluation.sets"
        raise ConfigError(f"key 'evaluation.best' = {evaluation.best!r} is no set of held-out prompts; {known}")
    if not evaluation.every:
        raise ConfigError(
            f"key 'evaluation.best' = {evaluation.best!r} has nothing to choose from where evaluation.every = 0; set "
            "evaluation.every"
        )


def check_paths(sets: Iterable[EvaluationSet]) -> None:
    """Refuse sets that are not there; that of `data.eval_path` is checked with the data."""
    for one in sets:
        if one.number and not one.source.path.exists():
            raise ConfigError(
                f"key '{one.key}.path' = {str(one.source.path)!r} does not exist; give a file or folder of prompts"
            )
