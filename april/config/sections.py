"""The keys of a run by section: types, defaults, units, and what follows from them alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field, PlainSerializer, WrapValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from april.config.algorithm import AlgorithmSection
from april.config.clusters import LaunchSection
from april.config.critic import CriticSection
from april.config.data import DataSection, SourceSection
from april.config.devices import DevicesSection
from april.config.evaluation import EvaluationSection, EvaluationSet, evaluation_sets
from april.config.lora import LoraSection
from april.config.presets import fill_preset
from april.config.section import CONTEXT_TOKENS, Section
from april.config.workers import (
    AgentSection,
    EngineSection,
    EnvironmentSection,
    RewardSection,
    ScorerSection,
    WorkerSection,
)
from april.wire.limits import TOP_K

NAME_BYTES = 200
"""of a run's folder; a file system takes 255, and a name that is taken gets a number"""


class RunSection(Section):
    name: str = Field("run", description="folder name of the run: letters, digits, spaces and signs, but no / or \\")
    dir: Path = Field(Path("runs"), description="where run folders are written")
    parts: list[Path] = Field(
        [], description="folders in which parts of your own are found; that of the configuration is one by itself"
    )
    target: str = Field(
        "local", description="where `april run` starts the parts: local, or yours as package.module:Class"
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


class ModelSection(Section):
    path: Path = Field(description="Hugging Face folder of the starting policy")


def or_auto(value: Any, validate: Callable[[Any], int | None]) -> Any:
    return AUTO if value == AUTO else validate(value)


AUTO = "auto"
Automatic = Annotated[
    Annotated[int, Field(ge=1)] | None, WrapValidator(or_auto), PlainSerializer(lambda value: value, return_type=Any)
]
"""a count of 1 or more, or `AUTO`, which `april.simulate.automatic` replaces by a count when a run starts"""


class ScheduleSection(Section):
    kind: str = Field(
        "april",
        description="sync waits for all; april stops at N; continuous never stops; or yours as package.module:Class",
    )
    rollout_batch_size: int = Field(32, ge=1, description="N: groups in a batch")
    over_sampling_batch_size: Automatic = Field(
        None, description="N': groups in a round if > N, groups opened at a time if < N; none: N; auto: from lengths"
    )
    n_samples_per_prompt: int = Field(8, ge=1, description="n: samples in a group")
    partial_rollout: bool = Field(True, description="resume aborted samples instead of discarding them")
    overlap: bool = Field(False, description="let the next round start while the learner trains")
    max_staleness: int = Field(5, ge=0, description="S: largest age of a trained token (policy steps)")
    max_steps: int = Field(100, ge=1, le=10**9, description="batches to train")
    last_batch: Literal["train", "drop"] = Field("train", description="what to do with a short last batch")
    min_group_size: int | None = Field(
        None, ge=1, description="a group may lose dead samples down to this size; none: n"
    )

    dynamic_sampling: bool = Field(False, description="discard and replace groups all right or all wrong")
    group_filter: str = Field(
        "", description="gives the reason to discard a complete group: zero_spread, or yours as package.module:function"
    )
    in_flight: Automatic = Field(
        None, description="C: samples that `continuous` keeps in generation; none: N' x n; auto: from lengths"
    )
    migrate: bool = Field(
        False, description="move a straggler to a worker with room if it is to end sooner there, re-prefill included"
    )
    scenario: Path | None = Field(
        None, description="file of `april tune` with the costs and lengths that auto starts from; none: plain costs"
    )

    @property
    def automatic_key(self) -> str:
        """The key that is still `AUTO`, empty if there is none."""
        return next((key for key in ("over_sampling_batch_size", "in_flight") if getattr(self, key) == AUTO), "")

    @property
    def groups_per_round(self) -> int:
        """N', N when it was not given."""
        return self.over_sampling_batch_size or self.rollout_batch_size

    @property
    def over_sampled(self) -> int:
        """N' where it is above N, otherwise 2 N: what plans compare."""
        per_round = self.groups_per_round
        return per_round if per_round > self.rollout_batch_size else 2 * self.rollout_batch_size

    @property
    def most_in_flight(self) -> int:
        """C: training samples that are generated at a time."""
        return self.in_flight or self.groups_per_round * self.n_samples_per_prompt

    @property
    def batches_in_reach(self) -> int:
        """Batches that may train a group: S + 1, or S where it is opened under the version before the batch's."""
        return self.max_staleness + (0 if self.overlap else 1)

    @property
    def filters_groups(self) -> bool:
        """Whether complete groups can be discarded for what they are."""
        return self.dynamic_sampling or bool(self.group_filter)


class SamplingSection(Section):
    max_response_tokens: int = Field(
        512, ge=1, le=CONTEXT_TOKENS, description="budget of a response over all its segments (tokens)"
    )
    temperature: float = Field(1.0, ge=0.01, description="softmax temperature of training samples")
    top_k: int = Field(
        0, ge=0, le=TOP_K, description="tokens kept of the distribution, the likeliest; above 0 on SGLang only"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="mass that the kept ones reach; below 1 needs a top_k as well")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="least mass, as a share of the likeliest's; needs a top_k as well"
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="further stop tokens beside the tokenizer's end of text"
    )

    @property
    def is_cut(self) -> bool:
        """Whether training samples are drawn from a part of the distribution, which then travels with every token."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class LearnerSection(Section):
    backend: str = Field("fsdp", description="back end that spreads the model over ranks, or your own")
    ranks: int = Field(2, ge=1, description="torchrun processes")
    tensor_parallel: int = Field(1, ge=1, description="ranks that share each layer, with a back end that splits layers")
    pipeline_parallel: int = Field(
        1, ge=1, description="stages that the layers are divided into, with a back end that splits layers"
    )
    expert_parallel: int = Field(
        1, ge=1, description="ranks that divide a layer's experts, each whole; 1: ranks that share it cut each expert"
    )
    lr: float = Field(1e-6, gt=0, description="AdamW learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="AdamW betas"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    minibatches: int = Field(
        1, ge=1, description="optimizer steps that share a batch; a group is in one of them, at random"
    )
    epochs: int = Field(1, ge=1, description="how often a batch is trained")
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm")
    microbatch_tokens: int = Field(8192, ge=1, description="tokens packed into one forward pass of a rank")
    compute: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="type of weights and activations in use, kept in fp32; auto: bf16 on accelerators"
    )
    activation_checkpointing: bool = Field(False, description="compute activations again to save memory")
    peak_tflops: float | None = Field(
        None, gt=0, description="a device's peak, for MFU; none: known accelerators' dense 16-bit peak (TFLOP/s)"
    )
    max_nonfinite: int = Field(3, ge=1, description="batches in a row without a finite loss before the run fails")
    checkpoint_every: int = Field(10, ge=1, description="steps between checkpoints; the last step has one too")
    keep_checkpoints: int = Field(2, ge=1, description="checkpoints kept")
    checkpoint_store: str = Field(
        "",
        description="URL of fsspec's where checkpoints lie, each run's under its name, as s3://bucket/folder; none: on "
        "the learner's disks alone",
    )
    checkpoint_store_timeout_s: float = Field(
        120.0, gt=0, description="longest wait for that store while nothing moves; each call is tried four times (s)"
    )
    threads: int = Field(1, ge=1, description="CPU threads of a rank")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: an accelerator where there is one")
    collective_timeout_s: float = Field(600.0, gt=0, description="longest wait in a collective (seconds)")
    max_restarts: int = Field(5, ge=0, description="restarts without a new step in between before giving up")
    pace_token_s: float = Field(
        0.0, ge=0, description="a step takes at least so long for each response token, as in a paced run (seconds)"
    )
    hung_s: float = Field(60.0, gt=0, description="one that is silent or gets nowhere for so long is ended (seconds)")
    load_s: float = Field(
        3600.0, gt=0, description="the same while it starts, does something for the first time, saves or exports (s)"
    )


class SamplesSection(Section):
    """What the learner keeps of the samples it has consumed, in `samples/` of the run folder, to be read."""

    every: int = Field(1, ge=0, description="steps between those of which samples are kept; 0: of none")
    groups: int | None = Field(
        8, ge=1, description="groups kept of a step: those of its best and worst sample, and random ones; none: all"
    )
    max_mb: int = Field(1024, ge=1, description="of all files; beyond, steps in between are thinned out (MiB)")


class BrokerSection(Section):
    bind: str = Field("tcp://127.0.0.1:*", description="ZeroMQ endpoint; * picks a free port")
    lease_s: float = Field(60.0, gt=0, description="a lease lives this long without renewal (seconds)")
    renew_s: float = Field(15.0, gt=0, description="workers renew their leases this often (seconds)")
    session_timeout_s: float = Field(10.0, gt=0, description="a silent worker's leases end (seconds)")
    attempts: int = Field(5, ge=1, description="lost or failed leases before a sample is dead")
    abort_deadline_s: float = Field(5.0, gt=0, description="longest wait for an aborted sample (seconds)")
    readopt_s: float = Field(10.0, gt=0, description="wait for former lease holders after a restart (seconds)")
    credit_mb: int = Field(64, ge=1, description="sent to a peer ahead of what it says has reached it (MiB)")
    journal_dir: Path | None = Field(
        None,
        description="folder of a disk for the journals of runs, each under its run's name; none: in the run's folder",
    )
    journal_file_mb: int = Field(512, ge=1, description="size of a journal file; a snapshot is taken with each (MiB)")
    journal_file_records: int = Field(500_000, ge=100, description="most records in a journal file")
    patience_s: float = Field(600.0, gt=0, description="peers wait this long for a broker that is away (seconds)")
    max_restarts: int = Field(5, ge=0, description="restarts without a new step in between before giving up")
    hung_s: float = Field(120.0, gt=0, description="`april run` restarts a broker silent for this long (seconds)")
    max_run_s: float = Field(3600.0, gt=0, description="a lease ends after this long, renewed or not (seconds)")


class WeightsSection(Section):
    transport: str = Field(
        "collective",
        description="what carries them: collective (process groups), external (your framework loads them into the "
        "servers), or yours as package.module:Class",
    )
    host: str = Field(
        AUTO, description="address under which workers reach learner rank 0; auto: the one that leads to the broker"
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="auto: nccl (RCCL on AMD) between accelerators, gloo otherwise"
    )
    publish_deadline_s: float = Field(10.0, gt=0, description="longest wait for workers at a publish (seconds)")
    join_deadline_s: float = Field(5.0, gt=0, description="longest wait for a lane to be built (seconds)")
    transfer_deadline_s: float = Field(30.0, gt=0, description="longest transfer to one worker in all (seconds)")
    bucket_mb: int = Field(16, ge=1, description="size of a broadcast (MiB)")
    canary: bool = Field(True, description="an engine must score a text as the learner does before it gets any lease")


class SecuritySection(Section):
    keys: Path | None = Field(
        None, description="folder of `april keygen`, or this part's key file; none: no encryption, loopback only"
    )
    max_sessions: int = Field(4096, ge=1, description="peers connected to the broker; more are refused")
    max_leases: int = Field(4096, ge=1, le=16384, description="leases of one worker, whatever capacity it states")


class OperationsSection(Section):
    http: str = Field(
        "127.0.0.1:0", description="HOST:PORT of the broker's /metrics and /health, port 0 picks a free one; none: off"
    )
    stuck_after_s: float = Field(
        30.0, gt=0, description="/health fails when the broker's loop has not come round for this long (seconds)"
    )
    sinks: list[str] = Field(
        [],
        description="where metrics go beside the run folder: tensorboard, wandb, mlflow, trackio, swanlab, or "
        "yours as package.module:Class",
    )
    alarms: list[str] = Field(
        [
            "nothing_trained",
            "slow_part",
            "wrong_weights",
            "engine_gap",
            "policy_gap",
            "effective_samples",
            "length_bias",
            "looping",
            "entropy_collapse",
            "staleness_bound",
            "starved_engines",
            "saturated_engines",
            "disk_filling",
        ],
        description="what says whether the run is in trouble, of those that ship all; or yours as package.module:Class",
    )
    log_format: Literal["text", "json"] = Field("text", description="log lines; json: one object a line, with ids")

    @property
    def http_address(self) -> tuple[str, int] | None:
        """(host, port), None where nothing is to be served."""
        host, _, port = self.http.rpartition(":")
        return None if self.http == "none" else (host, int(port))


class Config(Section):
    seed: int = Field(0, ge=0, description="data order and sampling")
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
    environment: EnvironmentSection = EnvironmentSection()
    agent: AgentSection = AgentSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    critic: CriticSection = CriticSection()
    learner: LearnerSection = LearnerSection()
    lora: LoraSection = LoraSection()
    samples: SamplesSection = SamplesSection()
    broker: BrokerSection = BrokerSection()
    weights: WeightsSection = WeightsSection()
    security: SecuritySection = SecuritySection()
    operations: OperationsSection = OperationsSection()
    devices: DevicesSection = DevicesSection()
    launch: LaunchSection = LaunchSection()

    @model_validator(mode="before")
    @classmethod
    def apply_preset(cls, tree: Any) -> Any:
        return fill_preset(tree, SamplingSection.model_fields["max_response_tokens"].default)

    @property
    def scorers(self) -> int:
        """Scorer processes that `april run` starts."""
        return self.scorer.count if self.reward.where == "scorer" else 0

    @property
    def agents(self) -> int:
        """Agents processes that `april run` starts."""
        return self.agent.count if self.agent.is_set else 0

    @property
    def evaluation_sets(self) -> list[EvaluationSet]:
        """Held-out prompts: those of `data.eval_path`, then those of `evaluation.sets`."""
        return evaluation_sets(self.evaluation, self.data)

    @property
    def sources(self) -> list[SourceSection]:
        """Where all prompts come from."""
        return [*self.data.train_sources, *(one.source for one in self.evaluation_sets)]

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def exported_policy(self) -> Path:
        """Where the learner leaves what it has trained, as a Hugging Face folder."""
        return self.run_dir / "checkpoints/policy"

    @property
    def exported_best(self) -> Path:
        """Where it leaves the best that it has trained, by `evaluation.best`, likewise."""
        return self.run_dir / "checkpoints/best"

    @property
    def exported_adapter(self) -> Path:
        """Where it leaves the adapter that it has trained, if there is one, as peft reads it."""
        return self.run_dir / "checkpoints/adapter"

    @property
    def context_tokens(self) -> int | None:
        """Longest prompt and response together that the model takes; None if its folder does not say."""
        return self._model_shape.get("max_position_embeddings")

    @property
    def vocabulary(self) -> int | None:
        """Token ids are below it; None if the model's folder does not say."""
        return self._model_shape.get("vocab_size")

    @property
    def attention_heads(self) -> tuple[int, int] | None:
        """(query heads, key-value heads); None if the model's folder does not say."""
        heads = self._model_shape.get("num_attention_heads")
        return (heads, self._model_shape.get("num_key_value_heads") or heads) if heads else None

    @property
    def _model_shape(self) -> dict[str, Any]:
        path = self.model.path / "config.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def longest_prompt_tokens(self) -> int:
        """What `data.max_prompt_tokens` and the model's context leave for a prompt."""
        context = self.context_tokens
        room = self.data.max_prompt_tokens if context is None else context - self.sampling.max_response_tokens
        return min(self.data.max_prompt_tokens, room)

    def to_toml(self) -> str:
        """The resolved configuration; `load` reads it back unchanged."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))
