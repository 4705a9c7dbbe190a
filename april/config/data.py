"""The keys of `[data]`: the files of prompts, and how their rows are read."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from april.config.section import CONTEXT_TOKENS, Section

Mapping = Literal["plain", "dapo_math", "deepscaler", "deepmath", "aime", "gsm8k"]


class SourceSection(Section):
    path: Path = Field(description="JSONL, JSON, Parquet or Arrow file of prompts, or a folder of such files.")
    weight: float = Field(
        1.0,
        gt=0,
        description="Rows drawn in an epoch, as a multiple of the source's rows: round(weight * rows). Above 1, rows "
        "repeat within an epoch.",
    )
    mapping: Mapping | None = Field(
        None, description="Published dataset whose field names these files use. None: data.mapping."
    )
    prompt_key: str | None = Field(None, description="Row field of the prompt. None: the mapping's.")
    label_key: str | None = Field(None, description="Row field of the reference answer. None: the mapping's.")
    reward: str | None = Field(None, description="Verifier of all rows of this source. None: data.reward.")

    def with_defaults(self, data: "DataSection") -> "SourceSection":
        """This source with unset keys taken from `data`; its row fields only if both have the same mapping."""
        mapping = self.mapping or data.mapping
        fields = ("prompt_key", "label_key", "reward") if mapping == data.mapping else ("reward",)
        missing = {key: getattr(data, key) for key in fields if getattr(self, key) is None}
        return self.model_copy(update={"mapping": mapping} | missing)


class DataSection(Section):
    source: Literal["files", "submitted"] = Field(
        "files",
        description="Where training prompts come from: files (data.path or data.sources), or submitted (a trainer of "
        "your own sends them; the journal keeps each until its batch is durable).",
    )
    path: Path | None = Field(
        None,
        description="Training prompts: a JSONL, JSON, Parquet or Arrow file, or a folder of such files. It is read "
        "once when the broker starts, and takes 8 bytes of memory a row.",
    )
    sources: list[SourceSection] = Field(
        [],
        description="Several files of training prompts with a weight each, in place of data.path; each a table "
        "[[data.sources]].",
    )
    mapping: Mapping = Field(
        "plain", description="Published dataset whose field names the rows use; plain: prompt and label."
    )
    prompt_key: str | None = Field(
        None, description="Row field of the prompt, a text or a list of chat messages. None: the mapping's."
    )
    label_key: str | None = Field(
        None,
        description="Row field of the reference answer, or several fields separated by commas. None: the mapping's.",
    )
    reward: str | None = Field(
        None,
        description="Verifier that scores the responses to all rows. None: the one that a row or the mapping names, "
        "otherwise reward.name.",
    )
    prompt_as: Literal["given", "chat", "text"] = Field(
        "given",
        description="How prompts become tokens: given (messages through the chat template, texts as they are), chat "
        "(texts through the template too), text (nothing through the template).",
    )
    template_options: dict[str, Any] = Field(
        {}, description="Keyword arguments of the chat template, such as enable_thinking."
    )
    bad_rows: Literal["stop", "skip"] = Field(
        "stop",
        description="What an unusable row does: stop refuses the run, skip leaves the row out and logs the first 20.",
    )
    eval_path: Path | None = Field(
        None,
        description="Held-out prompts for evaluation: a file or folder as data.path. They are generated at least at "
        "the start and the end. None: no evaluation.",
    )
    eval_mapping: Mapping | None = Field(
        None, description="Published dataset whose field names the held-out rows use. None: data.mapping."
    )
    max_prompt_tokens: int = Field(
        1024,
        ge=1,
        le=CONTEXT_TOKENS,
        description="Longest prompt (tokens); longer ones are left out and counted. Prefill time and KV cache grow "
        "with it.",
    )
    shuffle: bool = Field(
        True, description="Draw the rows in a new seeded order in each epoch; false: in the order of the file."
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description="Passes over the training prompts, after which the run ends. None: no limit.",
    )

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
        """A source at `path`; without a mapping of its own, or with the section's, it has the section's row fields."""
        if mapping is None:
            return self._source(path, self.mapping)
        same_mapping = mapping == self.mapping
        return SourceSection(
            path=path,
            mapping=mapping,
            prompt_key=self.prompt_key if same_mapping else None,
            label_key=self.label_key if same_mapping else None,
            reward=self.reward,
        )
