"""The keys of a run by section: types, defaults, units, and what follows from them alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WrapValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from april.config.presets import fill_preset
from april.wire.limits import CHUNK_TOKENS, TOP_K

NAME_BYTES = 200
"""of a run's folder; a file system takes 255, and a name that is taken gets a number"""
CONTEXT_TOKENS = 1 << 20
"""of a prompt, and of a response"""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class RunSection(Section):
    name: str = Field("run", description="folder name of the run: letters, digits, spaces and signs, but no / or \\")
    dir: Path = Field(Path("runs"), description="where run folders are written")
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
    path: Path | None = Field(None, description="training prompts: JSONL, JSON, Parquet or Arrow file, or folder")
    sources: list[SourceSection] = Field([], description="several of them, each with a weight, in place of data.path")
    mapping: Mapping = Field("plain", description="fields of a published dataset")
    prompt_key: str | None = Field(None, description="row key of the prompt, text or messages; none: the mapping's")
    label_key: str | None = Field(None, description="row key of the reference answer; none: the mapping's")
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


class EvaluationSection(Section):
    every: int = Field(0, ge=0, description="steps between evaluations; 0: at the start and at the end only")
    prompts: int = Field(256, ge=1, description="held-out prompts, the first ones of the file")
    samples: int = Field(1, ge=1, le=1024, description="k: samples of each, for mean@k and pass@k")
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_k: int = Field(0, ge=0, description="tokens kept of the distribution, the likeliest, 0: all")
    top_p: float = Field(1.0, gt=0, le=1, description="mass that the kept ones reach")
    share: float = Field(0.5, gt=0, le=1, description="largest share of a worker's slots")


class WorkerSection(Section):
    count: int = Field(2, ge=1, description="worker processes that `april run` starts")
    engine: str = Field(
        "torch",
        description="generation engine: torch, sglang, vllm, or yours as package.module:Class; servers': [engine]",
    )
    slots: int = Field(64, ge=1, description="sequences decoded together")
    prefetch: int = Field(8, ge=0, description="samples waiting in a worker for a free slot")
    report_s: float = Field(2.0, gt=0, description="new tokens of all sequences go out together this often (seconds)")
    chunk_tokens: int = Field(512, ge=1, le=CHUNK_TOKENS, description="those of one sequence after so many already")
    unacked_mb: int = Field(64, ge=1, description="a worker pauses while so much waits for the broker's disk (MiB)")
    max_restarts: int = Field(3, ge=0, description="restarts of each worker that bring nothing before giving up")
    threads: int = Field(1, ge=1, description="CPU threads of an engine")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: an accelerator where there is one")
    hung_s: float = Field(600.0, gt=0, description="`april run` restarts a worker absent for this long (seconds)")


class EngineSection(Section):
    """The SGLang servers, or the vLLM server, behind a worker."""

    url: list[str] = Field(
        [], description="servers that are kept by others, as http://HOST:PORT,http://HOST:PORT; none: start them"
    )
    servers: int = Field(1, ge=1, le=64, description="servers that a worker starts")
    python: Path | None = Field(
        None, description="interpreter that has the server's package; none: that of .venv-ENGINE"
    )
    port: int = Field(
        0, ge=0, le=65535, description="of the server that is started, of further ones those behind it; 0: any free"
    )
    server: dict[str, Any] = Field({}, description="its own options: --engine.server.OPTION VALUE, true: a bare flag")
    start_s: float = Field(600.0, gt=0, description="longest start of the server (seconds)")
    stall_s: float = Field(
        120.0, gt=0, description="a server silent for this long while it has requests is hung (seconds)"
    )
    update_s: float = Field(120.0, gt=0, description="longest change of weights (seconds)")
    max_restarts: int = Field(
        3, ge=0, description="restarts of the server in which it finishes nothing before giving up"
    )
    stream_tokens: int = Field(32, ge=1, description="tokens in an event of the server's stream")
    pause: Literal["abort", "retract", "in_place"] = Field(
        "abort", description="what running requests do while weights change; all but abort need stream_tokens = 1"
    )
    weights: Literal["disk", "tensor", "broadcast"] = Field(
        "disk", description="way into the server: a snapshot file, shared memory, or the learner's broadcast"
    )
    snapshot_dir: Path | None = Field(None, description="folder of snapshots; none: shared memory, else the system's")
    pace: str = Field("", description="hardware whose time a paced engine keeps: h100, mi300x, or a cost model's file")
    pace_factor: float = Field(1.0, gt=0, description="seconds that pass for each of that hardware's")

    @field_validator("url", mode="before")
    @classmethod
    def split_addresses(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @property
    def paced(self) -> str:
        """The hardware whose time the engines keep, and how slowly; empty where they run as fast as they can."""
        return f"{self.pace} x {self.pace_factor:g}" if self.pace else ""

    @property
    def tensor_ranks(self) -> int:
        """Tensor-parallel ranks of a server that is started here, as its options say."""
        return int(self.server.get("tp_size", self.server.get("tensor_parallel_size", 1)))


class RewardSection(Section):
    name: str = Field("final_answer", description="verifier for rows that name none")
    where: Literal["worker", "scorer"] = Field(
        "worker", description="who scores: the worker that generated, or processes of their own, see [scorer]"
    )
    timeout_s: float = Field(10.0, gt=0, description="a verifier is killed after this long (seconds)")
    processes: int = Field(1, ge=1, description="verifier processes of each worker, or of each scorer")
    memory_mb: int = Field(4096, ge=256, description="address space of a verifier process (MiB)")
    overlong_buffer_tokens: int = Field(0, ge=0, description="end of the budget in which length costs; 0: none")
    overlong_penalty: float = Field(1.0, ge=0, description="what a response of the whole budget loses by its length")
    format_pattern: str = Field("", description="regular expression that a response should match; empty: any")
    format_penalty: float = Field(1.0, ge=0, description="what a response loses that does not match it")
    url: str = Field("", description="address of the reward model of the verifier `remote`")
    code_test_s: float = Field(4.0, gt=0, description="longest run of a program in one test of `code` (seconds)")
    code_memory_mb: int = Field(1024, ge=64, description="address space of such a program (MiB)")
    over_limit: Literal["failed", "wrong"] = Field(
        "wrong", description="a response that no verifier can decide within its limits is wrong, or is tried again"
    )
    allowed: list[str] = Field([], description="verifiers that rows of the data may name; none given: those that ship")


class ScorerSection(Section):
    """Processes that only score; reward.where = 'scorer'."""

    count: int = Field(1, ge=1, description="scorer processes that `april run` starts")
    leases: int = Field(64, ge=1, description="responses, or groups that are scored together, taken at a time")
    max_restarts: int = Field(3, ge=0, description="restarts of each scorer that bring nothing before giving up")
    hung_s: float = Field(600.0, gt=0, description="`april run` restarts a scorer absent for this long (seconds)")


class EnvironmentSection(Section):
    """What answers the policy between turns."""

    name: str = Field("", description="environment, shipped or as package.module:function; empty: a single turn")
    turn_ends: list[str] = Field([], description="texts of one token each that end a turn, such as a closing tag")
    max_turn_tokens: int | None = Field(
        None, ge=1, description="sampled tokens after which a turn is over; none: all that the response may have"
    )
    max_observation_tokens: int = Field(512, ge=1, le=CHUNK_TOKENS, description="the rest of an answer is cut off")
    timeout_s: float = Field(10.0, gt=0, description="a call is killed after this long (seconds)")
    failure_text: str = Field(
        "", description="what the policy reads when a call fails; empty: the sample goes back and is tried again"
    )
    processes: int = Field(1, ge=1, description="environment processes of each worker")
    memory_mb: int = Field(4096, ge=256, description="address space of an environment process (MiB)")


class AgentSection(Section):
    """A program of one's own that speaks with the policy over HTTP."""

    program: str = Field("", description="async function of a session, as package.module:function; empty: no agents")
    command: list[str] = Field(
        [], description="a process for each session in its place, such as ['python', 'agent.py']"
    )
    attach: bool = Field(False, description="an outside harness comes for the sessions over HTTP")
    count: int = Field(1, ge=1, description="agents processes that `april run` starts")
    sessions: int = Field(64, ge=1, description="sessions that one of them has open at a time")
    listen: str = Field("127.0.0.1:0", description="HOST:PORT of the API; port 0: any that is free")
    timeout_s: float = Field(600.0, gt=0, description="a session is ended after this long (seconds)")
    chat_template: str = Field("", description="Jinja text in place of the tokeniser's own chat template")
    response_template: dict[str, Any] = Field(
        {}, description="how answers are parsed into texts and tool calls; none: the tokeniser's own, or not at all"
    )
    max_turn_tokens: int | None = Field(None, ge=1, description="of a turn whose request names none; none: all")
    overrides: Literal["refuse", "ignore"] = Field(
        "refuse", description="what becomes of requests that would change the distribution, such as a temperature"
    )
    max_restarts: int = Field(3, ge=0, description="restarts of each process that bring nothing before giving up")
    hung_s: float = Field(600.0, gt=0, description="`april run` restarts one absent for this long (seconds)")

    @property
    def is_set(self) -> bool:
        return bool(self.program or self.command or self.attach)


class LearnerSection(Section):
    ranks: int = Field(2, ge=1, description="torchrun processes")
    lr: float = Field(1e-6, gt=0, description="AdamW learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="AdamW betas"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
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
    threads: int = Field(1, ge=1, description="CPU threads of a rank")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: an accelerator where there is one")
    collective_timeout_s: float = Field(600.0, gt=0, description="longest wait in a collective (seconds)")
    max_restarts: int = Field(5, ge=0, description="restarts without a new step in between before giving up")
    pace_token_s: float = Field(
        0.0, ge=0, description="a step takes at least so long for each response token, as in a paced run (seconds)"
    )
    hung_s: float = Field(3600.0, gt=0, description="longest training step; then `april run` restarts it (seconds)")


class SamplesSection(Section):
    """What the learner keeps of the samples it has consumed, in `samples/` of the run folder, to be read."""

    every: int = Field(1, ge=0, description="steps between those of which samples are kept; 0: of none")
    groups: int | None = Field(
        8, ge=1, description="groups kept of a step: those of its best and worst sample, and random ones; none: all"
    )
    max_mb: int = Field(1024, ge=1, description="of all files; beyond, steps in between are thinned out (MiB)")


class AlgorithmSection(Section):
    preset: Literal["grpo", "dapo", "gspo"] | None = Field(
        None, description="sets what the paper sets; keys that are given win"
    )
    advantage: str = Field(
        "grpo",
        description="advantage estimator: grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, "
        "or yours as package.module:function",
    )
    loss: str = Field(
        "ppo", description="policy loss: ppo, gspo, gspo_token, cispo, or yours as package.module:function"
    )
    clip_low: float = Field(0.2, gt=0, le=1, description="ratio clipped below 1 - this; 1: no lower bound")
    clip_high: float = Field(0.28, gt=0, description="ratio clipped above 1 + this")
    dual_clip: float | None = Field(
        None, gt=1, description="a negative advantage counts at most this many times (ppo); none: no bound"
    )
    normalisation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean", description="what a token weighs in the loss of the global batch"
    )
    constant_tokens: int | None = Field(
        None, ge=1, description="length that normalisation = 'constant' divides by; none: sampling.max_response_tokens"
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of KL(policy || starting policy); 0: no reference is loaded")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="how that KL is estimated")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    behaviour_coef: float = Field(
        0.3, ge=0, description="weight of (log pi - log behaviour)^2 / 2, which draws stale tokens back; 0 on-policy"
    )
    proximal: Literal["behaviour", "recomputed", "interpolated"] = Field(
        "recomputed",
        description="the loss clips its ratio around what sampled the token, the policy before the step, "
        "or one version before it",
    )
    corrections: tuple[str, ...] = Field(
        ("truncated_sequence",),
        description="weights of stale tokens between behaviour and proximal policy, multiplied: truncated, "
        "truncated_sequence, icepop, geometric, on_policy_only, or yours as package.module:function",
    )
    truncation: float = Field(2.0, gt=0, description="truncated: largest importance weight of a token")
    sequence_truncation: float = Field(
        2.0, gt=0, description="truncated_sequence: largest importance weight of a response"
    )
    icepop_low: float = Field(0.5, ge=0, description="icepop: tokens with a smaller ratio are masked")
    icepop_high: float = Field(5.0, gt=0, description="icepop: tokens with a larger ratio are masked")
    geometric_low: float = Field(0.99, ge=0, description="geometric: responses with a smaller mean ratio are masked")
    geometric_high: float = Field(1.01, gt=0, description="geometric: responses with a larger mean ratio are masked")


class BrokerSection(Section):
    bind: str = Field("tcp://127.0.0.1:*", description="ZeroMQ endpoint; * picks a free port")
    lease_s: float = Field(60.0, gt=0, description="a lease lives this long without renewal (seconds)")
    renew_s: float = Field(15.0, gt=0, description="workers renew their leases this often (seconds)")
    session_timeout_s: float = Field(10.0, gt=0, description="a silent worker's leases end (seconds)")
    attempts: int = Field(5, ge=1, description="lost or failed leases before a sample is dead")
    abort_deadline_s: float = Field(5.0, gt=0, description="longest wait for an aborted sample (seconds)")
    readopt_s: float = Field(10.0, gt=0, description="wait for former lease holders after a restart (seconds)")
    credit_mb: int = Field(64, ge=1, description="sent to a peer ahead of what it says has reached it (MiB)")
    journal_file_mb: int = Field(512, ge=1, description="size of a journal file; a snapshot is taken with each (MiB)")
    journal_file_records: int = Field(250_000, ge=100, description="most records in a journal file")
    patience_s: float = Field(600.0, gt=0, description="peers wait this long for a broker that is away (seconds)")
    max_restarts: int = Field(5, ge=0, description="restarts without a new step in between before giving up")
    hung_s: float = Field(120.0, gt=0, description="`april run` restarts a broker silent for this long (seconds)")
    max_run_s: float = Field(3600.0, gt=0, description="a lease ends after this long, renewed or not (seconds)")


class WeightsSection(Section):
    transport: str = Field(
        "collective", description="what carries them: collective (process groups), or yours as package.module:Class"
    )
    host: str = Field("127.0.0.1", description="address under which workers reach learner rank 0")
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
        [], description="where metrics go beside the run folder: tensorboard, or yours as package.module:Class"
    )
    alarms: list[str] = Field(
        ["nothing_trained", "wrong_weights"],
        description="what says in every step whether the run is in trouble: nothing_trained, wrong_weights, or yours "
        "as package.module:Class",
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
    learner: LearnerSection = LearnerSection()
    samples: SamplesSection = SamplesSection()
    broker: BrokerSection = BrokerSection()
    weights: WeightsSection = WeightsSection()
    security: SecuritySection = SecuritySection()
    operations: OperationsSection = OperationsSection()

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
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def exported_policy(self) -> Path:
        """Where the learner leaves what it has trained, as a Hugging Face folder."""
        return self.run_dir / "checkpoints/policy"

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
