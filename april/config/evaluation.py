"""The keys of `[evaluation]`: sets of held-out prompts, and how they are sampled."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from april.config.data import DataSection, PromptsSection, SourceSection
from april.config.section import Section
from april.util.errors import refuse

HELD_OUT = "heldout"
"""Name of the evaluation set whose prompts are at `data.eval_path`."""
SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
SAMPLING_KEYS = ("prompts", "samples", "temperature", "top_k", "top_p")
"""Keys of `[evaluation]` that a set in `[evaluation.sets.NAME]` may override."""


class EvaluationSetSection(PromptsSection):
    prompts: int | None = Field(
        None,
        ge=1,
        description="Prompts used, the first ones of the files. More take longer. Unset: evaluation.prompts.",
    )
    samples: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Samples of each prompt, k of mean@k and pass@k. Generation time grows with it. Unset: "
        "evaluation.samples.",
    )
    temperature: float | None = Field(
        None, ge=0, description="Sampling temperature; 0: greedy. Unset: evaluation.temperature."
    )
    top_k: int | None = Field(
        None, ge=0, description="Sample among this many likeliest tokens; 0: all. Unset: evaluation.top_k."
    )
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Sample among the likeliest tokens that reach this probability mass. Unset: evaluation.top_p.",
    )


class EvaluationSection(Section):
    every: int = Field(
        0,
        ge=0,
        description="Policy steps between evaluations; 0: only at the start and at the end. While one lasts it takes "
        "up to evaluation.share of the decode slots.",
    )
    prompts: int = Field(
        256,
        ge=1,
        description="Held-out prompts used, the first ones of the file. More take longer and narrow the confidence "
        "interval.",
    )
    samples: int = Field(
        1,
        ge=1,
        le=1024,
        description="k: samples of each held-out prompt, for mean@k and pass@k. Generation time grows with it.",
    )
    temperature: float = Field(
        1.0,
        ge=0,
        description="Sampling temperature of evaluation samples; 0: greedy. A high value gives more diverse responses.",
    )
    top_k: int = Field(
        0,
        ge=0,
        description="Number of likeliest tokens among which evaluation samples; 0: all. A low "
        "value gives less diverse responses.",
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Probability mass of the likeliest tokens among which evaluation samples; 1: all. A low value "
        "gives less diverse responses.",
    )
    share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Largest share of each worker's slots that evaluation samples may take. A high value finishes "
        "evaluations sooner and slows training meanwhile.",
    )
    hold_s: float = Field(
        600.0,
        ge=0,
        description="Longest time for which workers put off newer weights until the samples of an evaluation have "
        "ended (seconds); samples that have not ended then count as not evaluated. Meanwhile the free slots of these "
        "workers generate nothing for training.",
    )
    sets: dict[str, EvaluationSetSection] = Field(
        {},
        description="Further sets of held-out prompts by name, as [evaluation.sets.NAME]. Each is generated in "
        "addition.",
    )
    best: str = Field(
        "",
        description="Set whose accuracy (reward, if it is not known what is correct) decides which checkpoint is "
        "kept and exported as the best: a name of evaluation.sets, or heldout for data.eval_path. It adds a "
        "checkpoint at each evaluation. Empty: none.",
    )

    @field_validator("sets")
    @classmethod
    def are_names(cls, sets: dict[str, EvaluationSetSection]) -> dict[str, EvaluationSetSection]:
        for name in sets:
            if not SET_NAME.fullmatch(name) or name == HELD_OUT:
                raise PydanticCustomError(
                    "name_of_a_set",
                    "should have names of up to 64 letters, digits, full stops, - and _, and none called "
                    f"{HELD_OUT}, which is that of data.eval_path",
                )
        return sets


@dataclass(frozen=True)
class EvaluationSet:
    """A set of held-out prompts, with defaults and overrides of its sampling keys resolved."""

    number: int
    """Number of the set in the journal: 0 for `data.eval_path`, from 1 on for the others in order of declaration."""
    name: str
    key: str
    """Section of the configuration that describes the set, for error sentences."""
    source: SourceSection
    prompts: int
    samples: int
    temperature: float
    top_k: int
    top_p: float


def evaluation_sets(evaluation: EvaluationSection, data: DataSection) -> list[EvaluationSet]:
    common = {key: getattr(evaluation, key) for key in SAMPLING_KEYS}
    found = [EvaluationSet(0, HELD_OUT, "evaluation", source, **common) for source in data.eval_sources]
    for number, (name, section) in enumerate(evaluation.sets.items(), 1):
        fields = {key: getattr(section, key) for key in PromptsSection.model_fields}
        overrides = {key: value for key in SAMPLING_KEYS if (value := getattr(section, key)) is not None}
        source = SourceSection(**fields).with_defaults(data)
        found.append(EvaluationSet(number, name, f"evaluation.sets.{name}", source, **common | overrides))
    return found


def check_evaluation(evaluation: EvaluationSection, sets: Iterable[EvaluationSet]) -> None:
    for evaluation_set in sets:
        if evaluation_set.samples > 1 and evaluation_set.temperature == 0:
            refuse(
                f"{evaluation_set.key}.samples",
                evaluation_set.samples,
                "asks for greedy samples, which are all the same",
                f"set {evaluation_set.key}.temperature above 0 or use 1",
            )
    if not evaluation.best:
        return
    names = [evaluation_set.name for evaluation_set in sets]
    if evaluation.best not in names:
        known = f"use {' or '.join(map(repr, names))}" if names else "set data.eval_path or evaluation.sets"
        refuse("evaluation.best", evaluation.best, "is no set of held-out prompts", known)
    if not evaluation.every:
        refuse(
            "evaluation.best",
            evaluation.best,
            "has nothing to choose from where evaluation.every = 0",
            "set evaluation.every",
        )


def check_set_paths(sets: Iterable[EvaluationSet]) -> None:
    """Refuse sets whose files do not exist, except `data.eval_path`, which `check_data` checks."""
    for held_out in sets:
        if held_out.number and not held_out.source.path.exists():
            key, path = f"{held_out.key}.path", held_out.source.path
            refuse(key, path, "does not exist", "give a file or folder of prompts")
