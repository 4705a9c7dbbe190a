"""The keys of `[data]`: where prompts come from, and how rows are read."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from april.config.section import CONTEXT_TOKENS, Section

Mapping = Literal["plain", "dapo_math", "deepscaler", "deepmath", "aime", "gsm8k"]


class SourceSection(Section):
    path: Path = Field(description="JSONL, JSON, Parquet or Arrow file, or a folder of them")
    weight: float = Field(1.0, gt=0, description="times that each of its rows is drawn in an epoch")
    mapping: Mapping | None = Field(None, description="fields of a published dataset; none: data.mapping")
    prompt_key: str | None = Field(None, description="row key of the prompt; none: the mapping's")
    label_key: str | None = Field(None, description="row key of the reference answer; none: the mapping's")
    reward: str | None = Field(None, description="verifier of all its rows; none: data.reward")

    def with_defaults(self, data: "DataSection") -> "SourceSection":
        """With the keys of the whole section where it has none of its own; `data`'s fields are those of its mapping."""
        mapping = self.mapping or data.mapping
        fields = ("prompt_key", "label_key", "reward") if mapping == data.mapping else ("reward",)
        missing = {key: getattr(data, key) for key in fields if getattr(self, key) is None}
        return self.model_copy(update={"mapping": mapping} | missing)


class DataSection(Section):
    source: Literal["files", "submitted"] = Field(
        "files", description="submitted: a trainer of your own brings the prompts; path and sources have no part"
    )
    path: Path | None = Field(None, description="training prompts: JSONL, JSON, Parquet or Arrow file, or folder")
    sources: list[SourceSection] = Field([], description="several of them, each with a weight, in place of data.path")
    mapping: Mapping = Field("plain", description="fields of a published dataset")
    prompt_key: str | None = Field(None, description="row key of the prompt, text or messages; none: the mapping's")
    label_key: str | None = Field(
        None, description="row key of the reference answer, or several with commas in between; none: the mapping's"
    )
    reward: str | None = Field(None, description="verifier of all rows; none: what rows or mapping name")
    prompt_as: Literal["given", "chat", "text"] = Field(
        "given", description="chat: texts go through the chat template, too; text: nothing does"
    )
    template_options: dict[str, Any] = Field({}, description="given to the chat template, such as enable_thinking")
    bad_rows: Literal["stop", "skip"] = Field("stop", description="what a row that cannot be used does to the run")
    eval_path: Path | None = Field(None, description="held-out prompts for evaluation; none: no evaluation")
    eval_mapping: Mapping | None = Field(None, description="fields of the held-out prompts; none: as in training")
    max_prompt_tokens: int = Field(1024, ge=1, le=CONTEXT_TOKENS, description="longer prompts are refused (tokens)")
    shuffle: bool = Field(True, description="a new seeded order every epoch")
    epochs: int | None = Field(None, ge=1, description="passes over the prompts; none: no limit")

    @property
    def train_sources(self) -> list[SourceSection]:
        if self.source == "submitted":
            return []
        if self.path:
            return [self._source(self.path, self.mapping)]
        return [source.with_defaults(self) for source in self.sources]

    @property
    def eval_sources(self) -> list[SourceSection]:
        return [self._source(self.eval_path, self.eval_mapping)] if self.eval_path else []

    def _source(self, path: Path, mapping: str | None) -> SourceSection:
        """A source with the keys of this section; those of the prompts for training hold where no mapping is named."""
        if mapping is None:
            return self._source(path, self.mapping)
        own = mapping == self.mapping
        return SourceSection(
            path=path,
            mapping=mapping,
            prompt_key=self.prompt_key if own else None,
            label_key=self.label_key if own else None,
            reward=self.reward,
        )
