"""The configuration of a run: its sections, and what follows from their keys alone."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import tomli_w
from pydantic import Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from april.config.broker import IPC, BrokerSection, OperationsSection, SecuritySection, WeightsSection
from april.config.clusters import DevicesSection, LaunchSection
from april.config.data import Commit, DataSection, SourceSection
from april.config.evaluation import EvaluationSection, EvaluationSet, evaluation_sets
from april.config.learner import LearnerSection, SamplesSection, SftSection
from april.config.presets import fill_preset
from april.config.rewards import RewardSection
from april.config.schedule import MOST_STEPS, SamplingSection, ScheduleSection
from april.config.section import AUTO, HUB_NAME, HubSection, Section
from april.config.training import AlgorithmSection, CriticSection, LoraSection
from april.config.workers import (
    AgentSection,
    EngineSection,
    EnvironmentSection,
    ScorerSection,
    TeacherSection,
    WorkerSection,
)
from april.util.files import read_whole, retried
from april.util.registry import REGISTRIES, registry_of
from april.util.text import masked
from april.wire.security.keys import RUN_KEYS

NAME_BYTES = 200
"""Longest name of a run folder in bytes: a file system takes 255, and a taken name gets a number appended."""


class RunSection(Section):
    name: str = Field(
        "run",
        description="Name of the run and of its folder: letters, digits, spaces and signs except / and \\. A taken "
        "name gets a number appended.",
    )
    dir: Path = Field(
        Path("runs"),
        description="Folder in which run folders are written. The journal in them takes 8 bytes for each token until "
        "a checkpoint contains the step that trained it.",
    )
    parts: list[Path] = Field(
        [],
        description="Folders in which Python modules of your own parts are found; the configuration's own folder is "
        "always one of them.",
    )
    target: str = Field(
        "local",
        description="Launch target that starts the processes of `april run`: local, or yours as package.module:Class.",
    )

    @field_validator("name")
    @classmethod
    def is_a_folder_s_name(cls, name: str) -> str:
        allowed = name.isprintable() and name == name.strip() and not set(name) & {"/", "\\"}
        if not allowed or not 1 <= len(name.encode()) <= NAME_BYTES or name.startswith("."):
            raise PydanticCustomError(
                "folder_name",
                f"should be a folder's name: letters, digits, spaces and signs without / and \\, up to {NAME_BYTES} "
                "bytes, without a full stop before it or spaces around it",
            )
        return name


class ModelSection(HubSection):
    repository: ClassVar[Literal["model", "dataset"]] = "model"
    path: Annotated[Path, HUB_NAME] = Field(
        description="Hugging Face folder of the starting policy, or the name of a model on a hub, such as "
        "Qwen/Qwen3-0.6B. It takes 16 bytes a parameter over all learner ranks (AdamW in fp32), and 2 or 4 bytes in "
        "each engine."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit, where model.path is the name of a model on a hub. Unset: main."
    )
    commit: Commit | None = Field(
        None,
        description="Commit that model.revision was resolved to; a start of a run sets it in the run's config.toml.",
    )


OF_SAMPLES = ("kind", "sft_rows", "sft_weight", "max_response_tokens", "hint_key", "teacher", "algorithm")
"""Keys of a source that say how its rows are sampled, or trained beside samples; without effect in `april sft`."""


class Config(Section):
    seed: int = Field(0, ge=0, lt=2**64, description="Seed of data order, sampling and minibatches.")
    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection
    schedule: ScheduleSection = ScheduleSection()
    sampling: SamplingSection = SamplingSection()
    evaluation: EvaluationSection = EvaluationSection()
    worker: WorkerSection = WorkerSection()
    engine: EngineSection = EngineSection()
    reward: RewardSection = RewardSection()
    scorer: ScorerSection = ScorerSection()
    teacher: dict[str, TeacherSection] = Field(
        {}, description="Teachers by name, as [teacher.NAME]: models that score each token of the policy."
    )
    environment: EnvironmentSection = EnvironmentSection()
    agent: AgentSection = AgentSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    critic: CriticSection = CriticSection()
    learner: LearnerSection = LearnerSection()
    lora: LoraSection = LoraSection()
    sft: SftSection = SftSection()
    samples: SamplesSection = SamplesSection()
    broker: BrokerSection = BrokerSection()
    weights: WeightsSection = WeightsSection()
    security: SecuritySection = SecuritySection()
    operations: OperationsSection = OperationsSection()
    devices: DevicesSection = DevicesSection()
    launch: LaunchSection = LaunchSection()
    _own_parts: frozenset[str] = PrivateAttr(frozenset(REGISTRIES))

    def importing(self, own_parts: Collection[str]) -> Self:
        """A copy of the configuration for a process that imports user-defined parts (losses, verifiers and so on) only
        if one of the keys `own_parts` (section.field) names them; those of other keys are not imported in that
        process."""
        copy = self.model_copy()
        copy._own_parts = frozenset(own_parts)
        return copy

    @property
    def own_parts(self) -> frozenset[str]:
        """Keys (section.field) whose user-defined parts this process imports."""
        return self._own_parts

    @model_validator(mode="before")
    @classmethod
    def apply_preset(cls, tree: Any) -> Any:
        return fill_preset(tree, SamplingSection.model_fields["max_response_tokens"].default)

    @property
    def scorers(self) -> int:
        """Number of scorer processes that `april run` starts."""
        return self.scorer.count if self.reward.where == "scorer" else 0

    @property
    def agents(self) -> int:
        """Number of agents processes that `april run` starts."""
        return self.agent.count if self.agent.is_set else 0

    @property
    def evaluation_sets(self) -> list[EvaluationSet]:
        """All sets of held-out prompts: `data.eval_path` first, then `evaluation.sets`."""
        return evaluation_sets(self.evaluation, self.data)

    @property
    def sources(self) -> list[SourceSection]:
        """Sources of all prompts, for training and for evaluation."""
        return [*self.data.train_sources, *(evaluation_set.source for evaluation_set in self.evaluation_sets)]

    @property
    def hub_sections(self) -> dict[str, HubSection]:
        """Sections whose paths may be names of a hub, by their keys."""
        found: dict[str, HubSection] = {"model": self.model, "data": self.data}
        found |= {f"data.sources.{number}": source for number, source in enumerate(self.data.sources)}
        return found | {f"evaluation.sets.{name}": section for name, section in self.evaluation.sets.items()}

    @property
    def commits(self) -> dict[str, str]:
        """Commits of the models and datasets that are taken from a hub, by the key of their revision, such as
        `model.revision`."""
        return {
            f"{key}.{prefix}revision": commit
            for key, section in self.hub_sections.items()
            for prefix in section.prefixes
            if (commit := getattr(section, f"{prefix}commit"))
        }

    @property
    def pins(self) -> list[str]:
        """Command-line overrides (`--model.commit=HASH`) with which another process takes the same commits of `[model]`
        and `[data]` from the hub; [] if neither is from a hub."""
        found = {key: commit for key, commit in self.commits.items() if key.count(".") == 1}
        return [f"--{key.replace('revision', 'commit')}={commit}" for key, commit in found.items()]

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def keys(self) -> Path | None:
        """Folder of the run's CURVE keys, or the key file of one process; None if peers need no keys."""
        return self.security.keys if isinstance(self.security.keys, Path) else self.made_keys

    @property
    def made_keys(self) -> Path | None:
        """Folder with the CURVE keys that April makes for the run; None if it makes none."""
        folder = self.run_dir / RUN_KEYS
        return folder if self.security.keys == AUTO and (self.broker.bind != IPC or folder.exists()) else None

    def with_keys(self, folder: Path) -> "Config":
        return self.model_copy(update={"security": self.security.model_copy(update={"keys": folder})})

    @property
    def exported_policy(self) -> Path:
        """Hugging Face folder to which the learner exports the trained policy."""
        return self.run_dir / "checkpoints/policy"

    @property
    def exported_best(self) -> Path:
        """Hugging Face folder to which the learner exports the best policy by `evaluation.best`."""
        return self.run_dir / "checkpoints/best"

    @property
    def exported_adapter(self) -> Path:
        """Folder to which the learner exports the trained adapter, in peft's format."""
        return self.run_dir / "checkpoints/adapter"

    @property
    def context_tokens(self) -> int | None:
        """Context length of the model (tokens), prompt and response together; None if its config.json does not say."""
        return self._size("max_position_embeddings")

    @property
    def vocabulary(self) -> int | None:
        """Vocabulary size of the model; None if its config.json does not say."""
        return self._size("vocab_size")

    @property
    def attention_heads(self) -> tuple[int, int] | None:
        """(query heads, key-value heads) of the model; None if its config.json does not say."""
        heads = self._size("num_attention_heads")
        return (heads, self._size("num_key_value_heads") or heads) if heads else None

    def _size(self, key: str) -> int | None:
        shape = self.model_shape or {}
        size = (shape.get("text_config") or shape).get(key, shape.get(key))
        return size if isinstance(size, int) else None

    @property
    def model_shape(self) -> dict[str, Any] | None:
        """Content of the model's config.json, empty if there is no such file; None if it is no JSON object. Raises
        OSError."""
        path = self.model.path / "config.json"
        try:
            shape = json.loads(read_whole(path)) if retried(path.exists) else {}
        except ValueError:
            return None
        return shape if isinstance(shape, dict) else None

    @property
    def longest_prompt_tokens(self) -> int:
        """Longest prompt (tokens) that `data.max_prompt_tokens` and the model's context leave room for."""
        context = self.context_tokens
        room = self.data.max_prompt_tokens if context is None else context - self.sampling.max_response_tokens
        return min(self.data.max_prompt_tokens, room)

    def supervised(self) -> "Config":
        """The configuration by which `april sft` trains the same model and data: each row is a group of one sample with
        the advantage 1, the loss is the cross-entropy at temperature 1, and nothing is generated or kept as a sample.
        If some sources are of kind sft, only these are trained. With `data.epochs`, `schedule.max_steps` bounds the run
        only if it was given."""
        sft, algorithm = self.sft, self.algorithm
        whole_rows = sft.max_tokens if algorithm.normalisation == "constant" else None
        by_epochs = self.data.epochs and "max_steps" not in self.schedule.model_fields_set
        plain = {name: SourceSection.model_fields[name].default for name in OF_SAMPLES}
        chosen = [source for source in self.data.sources if source.kind == "sft"] or self.data.sources
        sources = [source.model_copy(update=plain) for source in chosen]
        schedule = ScheduleSection(
            rollout_batch_size=sft.batch_size,
            n_samples_per_prompt=1,
            max_steps=MOST_STEPS if by_epochs else self.schedule.max_steps,
            last_batch=self.schedule.last_batch,
        )
        return self.model_copy(
            update={
                "algorithm": AlgorithmSection(
                    advantage="no_baseline", loss="cross_entropy", corrections=(), behaviour_coef=0.0,
                    normalisation=algorithm.normalisation, constant_tokens=algorithm.constant_tokens or whole_rows,
                ),
                "data": self.data.model_copy(update={"sources": sources, "hint_key": ""}),
                "schedule": schedule,
                "sampling": SamplingSection(max_response_tokens=1),
                "critic": CriticSection(),
                "samples": self.samples.model_copy(update={"every": 0}),
                "teacher": {},
                "reward": RewardSection(),
                "environment": EnvironmentSection(),
                "agent": AgentSection(),
                "engine": EngineSection(),
                "worker": WorkerSection(count=1, device="cpu", engine="transformers"),  # it takes all that trains
                "weights": WeightsSection(),
                "devices": self.devices.model_copy(update={"share": False}),
            }
        )  # fmt: skip

    def part_names(self, key: str) -> list[str]:
        """Names of the parts that a key (section.field) refers to: none for an empty value, several for a list."""
        section, _, field = key.partition(".")
        value = getattr(getattr(self, section), field)
        return ([value] if value else []) if isinstance(value, str) else list(value)

    def is_shipped(self, key: str) -> bool:
        """Whether all parts that a key refers to ship with April."""
        return set(self.part_names(key)) <= registry_of(key).shipped.keys()

    def shipped_part(self, key: str) -> Any:
        """The shipped part that a key names; None if it names a user-defined part, which this function does not
        import."""
        return registry_of(key).find(self.part_names(key)[0]) if self.is_shipped(key) else None

    def to_toml(self) -> str:
        """The whole configuration as TOML, defaults and secrets included; `load` reads it back unchanged."""
        return tomli_w.dumps(self.written())

    def without_secrets(self) -> "Config":
        """The configuration to be shown: its secrets are masked."""
        return type(self).model_validate(masked(self.model_dump(mode="json")))
