"""The keys of `[data]`: files of training and held-out prompts, and how their rows are read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from april.config.section import CONTEXT_TOKENS, HUB_NAME, HubSection
from april.util.registry import Registry
from april.util.text import final_number

# --- mappings ---------------------------------------------------------------------------------------------------------

COLUMN_SEPARATOR = ","
"""Separator in a label key that lists several columns; the label is then a JSON object."""


@dataclass(frozen=True)
class Mapping:
    """Locates the fields of a row in a record. A key may name a nested field, such as `reward_model.ground_truth`, or
    one with dots or commas in its own name."""

    dataset: str
    """Name of the published dataset, for `--help` and the reference."""
    prompt: tuple[str, ...] = ("prompt",)
    """Candidate keys of the prompt; the first one in the record is used."""
    label: tuple[str, ...] = ("label",)
    """Candidate keys of the label; the first one in the record is used."""
    reward: str | None = None
    """Name of the verifier for records that name none; None: the run's default verifier."""
    chat: bool = False
    """Whether a text prompt becomes a user message."""
    template: str = "{prompt}"
    """Template around a text prompt, applied before it becomes a message."""
    answer_of: Callable[[str], str | None] | None = None
    """Extracts the reference answer from a label that is a whole solution; returns None if there is none."""
    answer_form: str = ""
    """Example of the ending that `answer_of` looks for, for the error message."""
    all_columns: bool = False
    """Whether all fields of a record are read, and not only those that the other keys name."""
    images: tuple[str, ...] = ("images", "image")
    """Candidate keys of the images; the first one in the record is used."""
    hint: str = ""
    """Key of the hint, the row's own text for {hint} in `algorithm.hint`; empty: rows have none."""

    @property
    def columns(self) -> set[str]:
        """Names of the top-level fields that are read from a record; empty: all are read."""
        if self.all_columns:
            return set()
        labels = [key.strip() for label in self.label for key in (label, *label.split(COLUMN_SEPARATOR))]
        keys = filter(None, (*self.prompt, *labels, *self.images, self.hint))
        return {name for key in keys for name in dotted_prefixes(key)} | {"reward"}


def dotted_prefixes(key: str) -> list[str]:
    """Names of fields with which a key may begin, the longest first: of `a.b`, `a.b` and `a`."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


BOXED = "{prompt}\n\nReason step by step, and put the final answer into \\boxed{}."
MARKED = (
    "{prompt}\n\nReason step by step, and end with the final answer on a line of its own: "
    "#### and then the number alone."
)

MAPPINGS = {
    "plain": Mapping("fields prompt and label"),
    "dapo_math": Mapping(
        "BytedTsinghua-SIA/DAPO-Math-17k", label=("reward_model.ground_truth", "label"), reward="dapo"
    ),
    "deepscaler": Mapping(
        "agentica-org/DeepScaleR-Preview-Dataset", ("problem",), ("answer",), "deepscaler", chat=True, template=BOXED
    ),
    "deepmath": Mapping(
        "zwhe99/DeepMath-103K", ("question",), ("final_answer",), "math", chat=True, template=BOXED
    ),
    "aime": Mapping(
        "HuggingFaceH4/aime_2024, Maxwell-Jia/AIME_2024", ("problem", "Problem"), ("answer", "Answer"), "math",
        chat=True, template=BOXED,
    ),
    "gsm8k": Mapping(
        "openai/gsm8k, with a solution and #### 42 in answer", ("question",), ("answer",), "gsm8k",
        chat=True, template=MARKED, answer_of=final_number, answer_form="#### 42",
    ),
}  # fmt: skip
"""The mappings that `data.mapping` can name."""

OWN_MAPPING = replace(MAPPINGS["plain"], all_columns=True)
"""Mapping that is applied to what a user's own mapping function returns. The function itself gets whole records."""
MAPPING_PARTS = Registry("data.mapping", "mapping")
"""Registry of the user's own mappings: functions record -> dictionary with prompt and label."""


def is_own_mapping(name: str | None) -> bool:
    return name is not None and name not in MAPPINGS


def known_mapping(name: str) -> str:
    if is_own_mapping(name) and ":" not in name:
        raise PydanticCustomError(
            "mapping", f"should be one of {', '.join(map(repr, MAPPINGS))}, or your own as package.module:function"
        )
    return name


MappingName = Annotated[str, AfterValidator(known_mapping)]

# --- data -------------------------------------------------------------------------------------------------------------


Commit = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
"""Hash of a commit in a hub's repository."""


class PromptsSection(HubSection):
    path: Annotated[Path, HUB_NAME] = Field(
        description="JSONL, JSON, Parquet or Arrow file of prompts, a folder of such files, or the name of a dataset "
        "on a hub, such as openai/gsm8k."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a dataset on a hub. Unset: main.")
    commit: Commit | None = Field(None, description="Commit that the revision was resolved to, set at a run's start.")
    configuration: str | None = Field(
        None,
        description="Configuration of the dataset at path, as its README.md names them, or a folder in it. Unset: the "
        "only or default one.",
    )
    split: str | None = Field(
        None,
        description="Split of the dataset. Unset: of a hub's dataset the split train (test for evaluation) or the "
        "only one.",
    )
    mapping: MappingName | None = Field(
        None,
        description="Published dataset whose field names these files use, by a name that data.mapping lists. Unset: "
        "data.mapping.",
    )
    prompt_key: str | None = Field(
        None, description="Row field of the prompt. Unset: the field that the mapping names."
    )
    label_key: str | None = Field(
        None, description="Row field of the reference answer. Unset: the field that the mapping names."
    )
    images_key: str | None = Field(
        None, description="Row field of the images. Unset: images or image, where a row has it; empty: none."
    )
    reward: str | None = Field(None, description="Verifier of all rows of this source. Unset: data.reward.")


class SourceSection(PromptsSection):
    kind: Literal["prompts", "sft"] = Field(
        "prompts",
        description="What the rows are: prompts (sampled and trained by [algorithm]), or sft (conversations, of "
        "which each batch trains sft_rows beside its samples; sft.train_on says which of their tokens). Sources of "
        "kind sft stand last.",
    )
    sft_rows: int = Field(
        8,
        ge=1,
        description="Rows of a source of kind sft in each batch. More make each step longer, and the gradient of their "
        "loss less noisy.",
    )
    sft_weight: float = Field(
        0.1,
        gt=0,
        description="Factor on the loss of a source of kind sft (mean cross-entropy of its tokens), which is added to "
        "that of the samples. A high value holds the policy closer to the rows.",
    )
    weight: float = Field(
        1.0,
        gt=0,
        description="Rows drawn in an epoch, as a multiple of the source's rows: round(weight * rows). Above 1, rows "
        "repeat within an epoch.",
    )
    max_response_tokens: int | None = Field(
        None,
        ge=1,
        le=CONTEXT_TOKENS,
        description="Longest response to this source's prompts (tokens), at most sampling.max_response_tokens. A low "
        "value spends fewer tokens on it, and cuts long responses off. Unset: sampling.max_response_tokens.",
    )
    teacher: str = Field(
        "",
        description="Name of the [teacher.NAME] that scores the tokens of this source's samples. Empty: the only one.",
    )
    hint_key: str = Field(
        "", description="Row field that {hint} of algorithm.hint stands for. Empty: that of data.hint_key."
    )
    algorithm: dict[str, Any] = Field(
        {},
        description="Keys of [algorithm] that differ for this source, as a table [data.sources.algorithm]; all but "
        "preset, step_scale and hint. Its groups are then normalised apart.",
    )

    def with_defaults(self, data: "DataSection") -> "SourceSection":
        """A copy with unset keys taken from `data`; names of row fields are taken only if both have the same
        mapping."""
        mapping = self.mapping or data.mapping
        fields = ("prompt_key", "label_key", "images_key", "reward") if mapping == data.mapping else ("reward",)
        missing = {key: getattr(data, key) for key in fields if getattr(self, key) is None}
        return self.model_copy(update={"mapping": mapping} | missing)


RESERVED_TEMPLATE_OPTIONS = {
    "conversation", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "return_tensors",
    "return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that `data.template_options` may not set: April sets them, or they
are not passed on to the template."""


class DataSection(HubSection):
    prefixes: ClassVar[tuple[str, ...]] = ("", "eval_")
    source: Literal["files", "submitted"] = Field(
        "files",
        description="Where training prompts come from: files (data.path or data.sources), or submitted (a trainer of "
        "your own sends them; the journal keeps each until its batch is durable).",
    )
    path: Annotated[Path | None, HUB_NAME] = Field(
        None,
        description="Training prompts: a JSONL, JSON, Parquet or Arrow file, a folder of such files, or the name of a "
        "dataset on a hub, such as openai/gsm8k. It is read once when the broker starts, and takes 8 bytes of memory "
        "a row.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit, where data.path is the name of a dataset on a hub. Unset: main."
    )
    commit: Commit | None = Field(
        None,
        description="Commit that data.revision was resolved to; a start of a run sets it in the run's config.toml.",
    )
    configuration: str | None = Field(
        None,
        description="Configuration of the dataset at data.path, as its README.md names them, or a folder in it. Unset: "
        "the only or default one.",
    )
    split: str | None = Field(
        None,
        description="Split of the dataset at data.path. Unset: of a hub's dataset the split train or the only one; of "
        "a folder, all of its files.",
    )
    sources: list[SourceSection] = Field(
        [],
        description="Several files of training prompts with a weight each, in place of data.path; each a table "
        "[[data.sources]].",
    )
    mapping: MappingName = Field(
        "plain",
        description="Published dataset whose field names the rows use: "
        + "; ".join(f"{name} ({mapping.dataset})" for name, mapping in MAPPINGS.items())
        + "; or yours as package.module:function.",
    )
    prompt_key: str | None = Field(
        None,
        description="Row field of the prompt, a text or a list of chat messages. Unset: the field that the mapping "
        "names.",
    )
    label_key: str | None = Field(
        None,
        description="Row field of the reference answer; several, separated by commas, give the verifier an object with "
        "a value by field. Unset: the field that the mapping names.",
    )
    images_key: str | None = Field(
        None,
        description="Row field of the prompt's images, one or a list. Unset: images or image, where a row has it; "
        "empty: no images.",
    )
    hint_key: str = Field(
        "",
        description="Row field of a text, such as a solution, that {hint} of algorithm.hint stands for. Empty: none.",
    )
    reward: str | None = Field(
        None,
        description="Verifier that scores the responses to all rows. Unset: the one that a row or the mapping names, "
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
    continue_final_message: bool = Field(
        True,
        description="A prompt that ends with an assistant message is continued by the response. False: that message is "
        "closed, and the response is a further one.",
    )
    add_bos: bool | None = Field(
        None,
        description="Whether a text prompt begins with the tokenizer's beginning-of-sequence token. Unset: as "
        "transformers encodes a text by default. Chat templates print their own.",
    )
    bad_rows: Literal["stop", "skip"] = Field(
        "stop",
        description="What an unusable row does: stop refuses the run, skip leaves the row out and logs the first 20.",
    )
    eval_path: Annotated[Path | None, HUB_NAME] = Field(
        None,
        description="Held-out prompts for evaluation: a file, folder or name as data.path. They are generated at "
        "least at the start and the end. Unset: no evaluation.",
    )
    eval_revision: str | None = Field(
        None,
        description="Branch, tag or commit of data.eval_path. Unset: data.revision if data.path is the same dataset, "
        "otherwise main.",
    )
    eval_commit: Commit | None = Field(
        None,
        description="Commit that data.eval_revision was resolved to; a start of a run sets it in the run's "
        "config.toml.",
    )
    eval_configuration: str | None = Field(
        None,
        description="Configuration of the dataset at data.eval_path. Unset: data.configuration if data.path is the "
        "same dataset, otherwise the only or default one.",
    )
    eval_split: str | None = Field(
        None,
        description="Split of the dataset at data.eval_path. Unset: of a hub's dataset the split test, validation or "
        "the only one.",
    )
    eval_mapping: MappingName | None = Field(
        None,
        description="Published dataset whose field names the held-out rows use, by a name that data.mapping lists. "
        "Unset: data.mapping.",
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
        description="Passes over the training prompts, after which the run ends. Unset: no limit.",
    )

    @field_validator("template_options")
    @classmethod
    def are_the_template_s(cls, options: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted(options.keys() & RESERVED_TEMPLATE_OPTIONS):
            raise PydanticCustomError(
                "template_options", "should not have {name}, which April sets", {"name": reserved[0]}
            )
        return options

    @property
    def prompt_options(self) -> dict[str, Any]:
        """Arguments of `Tokenizer.encode_prompt` that say how prompts become tokens."""
        return {"options": self.template_options, "continues": self.continue_final_message, "bos": self.add_bos}

    @property
    def train_sources(self) -> list[SourceSection]:
        """Sources of training prompts; none where the trainer submits them."""
        if self.source == "submitted":
            return []
        listed = [each.with_defaults(self) for each in self.prompt_sources]
        own = [self._source("", self.mapping)] if self.path else listed
        return [source.model_copy(update={"hint_key": source.hint_key or self.hint_key}) for source in own]

    @property
    def prompt_sources(self) -> list[SourceSection]:
        """The entries of `data.sources` that are of kind prompts."""
        return [source for source in self.sources if source.kind == "prompts"]

    @property
    def sft_sources(self) -> dict[int, SourceSection]:
        """The entries of `data.sources` that are of kind sft, by their index in that list."""
        listed = enumerate(self.sources)
        return {number: source.with_defaults(self) for number, source in listed if source.kind == "sft"}

    @property
    def eval_sources(self) -> list[SourceSection]:
        return [self._source("eval_", self.eval_mapping)] if self.eval_path else []

    def _source(self, prefix: str, mapping: str | None) -> SourceSection:
        """The source whose keys in `[data]` have this prefix: "" for `path`, "eval_" for `eval_path`. It inherits the
        row field names of `[data]` if `mapping` is None or equals `data.mapping`."""
        if mapping is None:
            return self._source(prefix, self.mapping)
        same_mapping = mapping == self.mapping
        return SourceSection(
            **{key: getattr(self, prefix + key) for key in ("path", "commit", "configuration", "split")},
            mapping=mapping,
            prompt_key=self.prompt_key if same_mapping else None,
            label_key=self.label_key if same_mapping else None,
            images_key=self.images_key if same_mapping else None,
            reward=self.reward,
        )
