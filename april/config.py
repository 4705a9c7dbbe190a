"""The one TOML file that describes a run: its keys, their defaults and units, and what is refused.

`load(path, overrides)` returns a validated `Config` or raises `ConfigError`, whose text is one sentence
that names the key, the value and the mend.
"""

import difflib
import ipaddress
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from april.limits import CHUNK_TOKENS, CONTEXT_TOKENS

OVERRIDES = "every key of the configuration can be given as --section.key value:\n"

PUBLISHED_FLAGS = {
    "rollout-batch-size": "schedule.rollout_batch_size",
    "over-sampling-batch-size": "schedule.over_sampling_batch_size",
    "n-samples-per-prompt": "schedule.n_samples_per_prompt",
    "partial-rollout": "schedule.partial_rollout",
}
"""Flags of the published method, by their own names."""


class ConfigError(ValueError):
    """A configuration that cannot work; the text says which key, which value and how to mend it."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class RunSection(Section):
    name: str = Field(
        "run", min_length=1, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", description="folder name of the run"
    )
    dir: Path = Field(Path("runs"), description="where run folders are written")


class ModelSection(Section):
    path: Path = Field(description="Hugging Face folder of the starting policy")


class DataSection(Section):
    path: Path = Field(description="training prompts: JSONL with prompt and label")
    eval_path: Path | None = Field(None, description="held-out prompts for evaluation; none: no evaluation")
    prompt_key: str = Field("prompt", description="row key of the prompt: chat messages or text")
    label_key: str = Field("label", description="row key of the reference answer")
    max_prompt_tokens: int = Field(1024, ge=1, le=CONTEXT_TOKENS, description="longer prompts are refused (tokens)")
    shuffle: bool = Field(True, description="a new seeded order every epoch")
    epochs: int | None = Field(None, ge=1, description="passes over the prompts; none: no limit")


class ScheduleSection(Section):
    kind: Literal["sync", "april", "continuous"] = Field(
        "april", description="sync waits for all; april stops at N; continuous never stops"
    )
    rollout_batch_size: int = Field(32, ge=1, description="N: groups in a batch")
    over_sampling_batch_size: int | None = Field(
        None, ge=1, description="N': groups in a round if > N, groups opened at a time if < N; none: N"
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

    in_flight: int | None = Field(
        None, ge=1, description="C: samples that `continuous` keeps in generation; none: N' x n"
    )

    @property
    def groups_per_round(self) -> int:
        """N', N when it was not given."""
        return self.over_sampling_batch_size or self.rollout_batch_size

    @property
    def most_in_flight(self) -> int:
        """C: training samples that are generated at a time."""
        return self.in_flight or self.groups_per_round * self.n_samples_per_prompt

    @property
    def batches_in_reach(self) -> int:
        """Batches that may train a group: S + 1, or S where it is opened under the version before the batch's."""
        return self.max_staleness + (0 if self.overlap else 1)

    @property
    def groups_outlive_a_round(self) -> bool:
        """Whether a batch is trained while other groups are unfinished."""
        return self.kind == "continuous" or self.groups_per_round > self.rollout_batch_size


class SamplingSection(Section):
    max_response_tokens: int = Field(
        512, ge=1, le=CONTEXT_TOKENS, description="budget of a response over all its segments (tokens)"
    )
    temperature: float = Field(1.0, ge=0.01, description="softmax temperature of training samples")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass; training needs 1.0")
    top_k: int = Field(0, ge=0, description="most likely tokens kept, 0 keeps all; training needs 0")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="further stop tokens beside the tokenizer's end of text"
    )


class EvaluationSection(Section):
    every: int = Field(0, ge=0, description="steps between evaluations; 0: at the start and at the end only")
    prompts: int = Field(256, ge=1, description="held-out prompts, the first ones of the file")
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    share: float = Field(0.5, gt=0, le=1, description="largest share of a worker's slots")


class WorkerSection(Section):
    count: int = Field(2, ge=1, description="worker processes that `april run` starts")
    engine: Literal["torch"] = Field("torch", description="generation engine")
    slots: int = Field(64, ge=1, description="sequences decoded together")
    prefetch: int = Field(8, ge=0, description="samples waiting in a worker for a free slot")
    chunk_tokens: int = Field(512, ge=1, le=CHUNK_TOKENS, description="a chunk is sent after this many tokens")
    chunk_s: float = Field(2.0, gt=0, description="or after this long (seconds)")
    max_restarts: int = Field(3, ge=0, description="restarts of each worker that bring nothing before giving up")
    threads: int = Field(1, ge=1, description="CPU threads of an engine")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: an accelerator where there is one")
    hung_s: float = Field(600.0, gt=0, description="`april run` restarts a worker absent for this long (seconds)")


class RewardSection(Section):
    name: str = Field("final_answer", description="verifier for rows that name none")
    timeout_s: float = Field(10.0, gt=0, description="a verifier is killed after this long (seconds)")
    processes: int = Field(1, ge=1, description="verifier processes of each worker")


class LearnerSection(Section):
    ranks: int = Field(2, ge=1, description="torchrun processes")
    lr: float = Field(1e-6, gt=0, description="AdamW learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="AdamW betas"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    clip_low: float = Field(0.2, gt=0, lt=1, description="ratio clipped below 1 - this")
    clip_high: float = Field(0.28, gt=0, description="ratio clipped above 1 + this")
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm")
    microbatch_tokens: int = Field(8192, ge=1, description="tokens packed into one forward pass of a rank")
    checkpoint_every: int = Field(10, ge=1, description="steps between checkpoints; the last step has one too")
    keep_checkpoints: int = Field(2, ge=1, description="checkpoints kept")
    threads: int = Field(1, ge=1, description="CPU threads of a rank")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: an accelerator where there is one")
    collective_timeout_s: float = Field(600.0, gt=0, description="longest wait in a collective (seconds)")
    max_restarts: int = Field(5, ge=0, description="restarts without a new step in between before giving up")
    hung_s: float = Field(3600.0, gt=0, description="longest training step; then `april run` restarts it (seconds)")


class BrokerSection(Section):
    bind: str = Field("tcp://127.0.0.1:*", description="ZeroMQ endpoint; * picks a free port")
    lease_s: float = Field(60.0, gt=0, description="a lease lives this long without renewal (seconds)")
    renew_s: float = Field(15.0, gt=0, description="workers renew their leases this often (seconds)")
    session_timeout_s: float = Field(10.0, gt=0, description="a silent worker's leases end (seconds)")
    attempts: int = Field(5, ge=1, description="lost or failed leases before a sample is dead")
    abort_deadline_s: float = Field(5.0, gt=0, description="longest wait for an aborted sample (seconds)")
    readopt_s: float = Field(10.0, gt=0, description="wait for former lease holders after a restart (seconds)")
    credit_mb: int = Field(64, ge=1, description="sent to a peer ahead of what it says has reached it (MiB)")
    segment_mb: int = Field(512, ge=1, description="size of a journal file; a snapshot is taken with each (MiB)")
    segment_records: int = Field(250_000, ge=100, description="most records in a journal file")
    patience_s: float = Field(600.0, gt=0, description="peers wait this long for a broker that is away (seconds)")
    max_restarts: int = Field(5, ge=0, description="restarts without a new step in between before giving up")
    hung_s: float = Field(120.0, gt=0, description="`april run` restarts a broker silent for this long (seconds)")
    max_run_s: float = Field(3600.0, gt=0, description="a lease ends after this long, renewed or not (seconds)")


class WeightsSection(Section):
    host: str = Field("127.0.0.1", description="address under which workers reach learner rank 0")
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="auto: nccl (RCCL on AMD) between accelerators, gloo otherwise"
    )
    publish_deadline_s: float = Field(10.0, gt=0, description="longest wait for workers at a publish (seconds)")
    join_deadline_s: float = Field(5.0, gt=0, description="longest wait for a lane to be built (seconds)")
    transfer_deadline_s: float = Field(30.0, gt=0, description="longest transfer to one worker (seconds)")
    bucket_mb: int = Field(16, ge=1, description="size of a broadcast (MiB)")


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
    reward: RewardSection = RewardSection()
    learner: LearnerSection = LearnerSection()
    broker: BrokerSection = BrokerSection()
    weights: WeightsSection = WeightsSection()
    security: SecuritySection = SecuritySection()
    operations: OperationsSection = OperationsSection()

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def context_tokens(self) -> int | None:
        """Longest prompt and response together that the model takes; None if its folder does not say."""
        return self._model_shape.get("max_position_embeddings")

    @property
    def vocabulary(self) -> int | None:
        """Token ids are below it; None if the model's folder does not say."""
        return self._model_shape.get("vocab_size")

    @property
    def _model_shape(self) -> dict[str, Any]:
        return json.loads((self.model.path / "config.json").read_text())

    @property
    def longest_prompt_tokens(self) -> int:
        """What `data.max_prompt_tokens` and the model's context leave for a prompt."""
        context = self.context_tokens
        room = self.data.max_prompt_tokens if context is None else context - self.sampling.max_response_tokens
        return min(self.data.max_prompt_tokens, room)

    def to_toml(self) -> str:
        """The resolved configuration; `load` reads it back unchanged."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def load(path: str | Path, overrides: list[str] = ()) -> Config:
    """Read a TOML file, apply `--section.key value` overrides, validate, and check that parts fit together."""
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist; give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} cannot be read ({error}); give a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}; mend that line") from None
    for key, value in parse_overrides(overrides):
        set_key(tree, key, value)
    config = validate(tree)
    check(config)
    return config


def validate(tree: dict) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(sentence(error.errors()[0])) from None


def parse_overrides(arguments: list[str]) -> list[tuple[str, Any]]:
    """`--a.b value`, `--a.b=value`, and bare `--a.b` / `--no-a.b` for booleans -> [(key, value)]."""
    pairs, rest = [], list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            raise ConfigError(f"argument {flag!r} is not an option; write overrides as --section.key value")
        name, has_value, text = flag[2:].partition("=")
        if not has_value and rest and not rest[0].startswith("--"):
            text, has_value = rest.pop(0), "="
        negated = name.startswith("no-") and not has_value
        name = name.removeprefix("no-") if negated else name
        key = PUBLISHED_FLAGS.get(name, name.replace("-", "_"))
        pairs.append((key, parse_value(text) if has_value else not negated))
    return pairs


def parse_value(text: str) -> Any:
    """A TOML value where the text is one, otherwise the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def set_key(tree: dict, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"key {key!r} goes through {section!r}, which is not a section; see `april run --help`")
    tree[name] = value


def known_keys() -> dict[str, Any]:
    """Every key of the configuration with its pydantic field, in order of declaration."""
    keys = {}
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            keys.update({f"{name}.{key}": inner for key, inner in section.model_fields.items()})
        else:
            keys[name] = field
    return keys


def describe_keys() -> str:
    """The `--help` listing: every key, its default and its meaning with the unit."""
    lines = []
    for key, field in known_keys().items():
        default = "required" if field.is_required() else f"default {field.default}"
        choices = "|".join(map(str, get_args(field.annotation))) if get_origin(field.annotation) is Literal else ""
        choices = "true|false" if field.annotation is bool else choices
        lines.append(f"  --{key:38} {field.description} [{choices}{', ' if choices else ''}{default}]")
    lines.append("\nthe published flags by their own names:")
    lines += [f"  --{flag:38} = --{key}" for flag, key in PUBLISHED_FLAGS.items()]
    return "\n".join(lines)


def sentence(error: dict) -> str:
    """One sentence from a pydantic error: the key, the value, what was expected."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.5)
        mend = f"did you mean {close[0]!r}?" if close else "`april run --help` lists the keys"
        return f"unknown key {key!r} = {error['input']!r}; {mend}"
    if error["type"] == "missing":
        key = {"model": "model.path", "data": "data.path"}.get(key, key)
        return f"key {key!r} is missing; set it in the file or with --{key} VALUE"
    if error["type"] == "model_type":
        return f"key {key!r} = {error['input']!r} is refused: it is a section; write its keys under [{key}]"
    expected = re.sub(r"^\w+ should ", "should ", error["msg"])
    return f"key {key!r} = {error['input']!r} is refused: it {expected}; mend it in the file or with --{key} VALUE"


def check_address(address: str) -> str:
    """A broker's address as peers connect to it: tcp://HOST:PORT."""
    found = re.fullmatch(r"tcp://[^:/\s]+:(\d+)", address)
    if not found or not 0 < int(found[1]) < 65536:
        raise ConfigError(f"option '--connect' = {address!r} is no address; give the broker's as tcp://HOST:PORT")
    return address


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; of names only localhost is known to be so."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


def check_continuous(schedule: ScheduleSection) -> None:
    """Refuse what `continuous` has no use for, and more samples in flight than the staleness bound ever admits."""
    if not schedule.partial_rollout:
        raise ConfigError(
            "key 'schedule.partial_rollout' = False cannot be: schedule.kind = 'continuous' ends no round, so that "
            "nothing is discarded unfinished; leave it true, or use schedule.kind = 'april'"
        )
    if schedule.overlap:
        raise ConfigError(
            "key 'schedule.overlap' = True says nothing: schedule.kind = 'continuous' always generates while the "
            "learner trains; leave it out, or use schedule.kind = 'april'"
        )
    groups, n = schedule.rollout_batch_size, schedule.n_samples_per_prompt
    admitted = schedule.batches_in_reach * groups * n
    if schedule.in_flight is not None and schedule.in_flight > admitted:
        raise ConfigError(
            f"key 'schedule.in_flight' = {schedule.in_flight} exceeds {admitted}, the most samples that "
            f"schedule.max_staleness = {schedule.max_staleness} ever admits for {groups} x {n} in a batch; "
            "lower it or raise max_staleness"
        )


def check(config: Config) -> None:
    """Refuse what is valid key by key but cannot work together."""
    schedule, learner = config.schedule, config.learner
    n, groups, per_round = schedule.n_samples_per_prompt, schedule.rollout_batch_size, schedule.groups_per_round
    if n < 2:
        raise ConfigError(
            f"key 'schedule.n_samples_per_prompt' = {n} gives group-relative advantages nothing to compare; "
            "use 2 or more"
        )
    if schedule.kind == "sync" and per_round > groups:
        raise ConfigError(
            f"key 'schedule.over_sampling_batch_size' = {per_round} over-samples N = {groups}, "
            "which schedule.kind = 'sync' never does; use schedule.kind = 'april' or leave the key out"
        )
    if schedule.kind == "continuous":
        check_continuous(schedule)
    elif schedule.in_flight is not None:
        raise ConfigError(
            f"key 'schedule.in_flight' = {schedule.in_flight} is for schedule.kind = 'continuous', not "
            f"{schedule.kind!r}; leave it out, or set schedule.over_sampling_batch_size"
        )
    admitted = schedule.batches_in_reach * groups
    if per_round > admitted:
        raise ConfigError(
            f"key 'schedule.over_sampling_batch_size' = {per_round} exceeds {admitted}, the most that "
            f"schedule.max_staleness = {schedule.max_staleness} allows for N = {groups}"
            f"{' with overlap' if schedule.overlap else ''}; lower it or raise max_staleness"
        )
    if (groups * n) % learner.ranks:
        raise ConfigError(
            f"key 'learner.ranks' = {learner.ranks} cannot split a batch of {groups} x {n} samples evenly; "
            "use a divisor of it"
        )
    if schedule.min_group_size and schedule.min_group_size > n:
        raise ConfigError(
            f"key 'schedule.min_group_size' = {schedule.min_group_size} exceeds n = {n}; use a value from 1 to {n}"
        )
    if config.sampling.top_p != 1.0 or config.sampling.top_k != 0:
        key, value = (
            ("top_p", config.sampling.top_p) if config.sampling.top_p != 1.0 else ("top_k", config.sampling.top_k)
        )
        raise ConfigError(
            f"key 'sampling.{key}' = {value} cuts the distribution that behaviour log-probabilities describe, so "
            "training on it would be biased; use top_p = 1.0 and top_k = 0"
        )
    port = re.fullmatch(r"tcp://[^:/\s]+:(\*|\d+)", config.broker.bind)
    if not port or (port[1] != "*" and not 0 < int(port[1]) < 65536):
        raise ConfigError(
            f"key 'broker.bind' = {config.broker.bind!r} is no address; use tcp://INTERFACE:PORT, * for a free port"
        )
    hosts = {"broker.bind": config.broker.bind[len("tcp://") : -len(port[1]) - 1], "weights.host": config.weights.host}
    for key, host in hosts.items():
        if config.security.keys is None and not is_loopback(host):
            value = config.broker.bind if key == "broker.bind" else host
            raise ConfigError(
                f"key {key!r} = {value!r} would let anybody on the network in; make keys with `april keygen KEYS` and "
                "set security.keys = 'KEYS', or keep to 127.0.0.1"
            )
    if config.security.keys is not None and not config.security.keys.exists():
        raise ConfigError(
            f"key 'security.keys' = {str(config.security.keys)!r} does not exist; make it with "
            f"`april keygen {config.security.keys}`"
        )
    port = re.fullmatch(r"[^:/\s]+:(\d+)", config.operations.http)
    if config.operations.http != "none" and not (port and int(port[1]) < 65536):
        raise ConfigError(
            f"key 'operations.http' = {config.operations.http!r} is no address; use HOST:PORT, port 0 for a free one, "
            "or none"
        )
    if config.broker.renew_s >= config.broker.lease_s:
        raise ConfigError(
            f"key 'broker.renew_s' = {config.broker.renew_s} is not below broker.lease_s = {config.broker.lease_s}; "
            "a lease would end before its renewal: lower renew_s"
        )
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(
            f"key 'model.path' = {str(config.model.path)!r} is not a Hugging Face model folder (no config.json); "
            "give one, or make the quickstart's with `april make-policy`"
        )
    try:
        room = config.longest_prompt_tokens
    except (OSError, ValueError, AttributeError):
        raise ConfigError(
            f"key 'model.path' = {str(config.model.path)!r} has a config.json that is not a JSON object; "
            "give a whole Hugging Face folder"
        ) from None
    if room < 1:
        raise ConfigError(
            f"key 'sampling.max_response_tokens' = {config.sampling.max_response_tokens} leaves no room for a prompt "
            f"in the model's context of {config.context_tokens} tokens; lower it"
        )
    for key, path in [("data.path", config.data.path), ("data.eval_path", config.data.eval_path)]:
        if path is not None and not path.is_file():
            raise ConfigError(
                f"key {key!r} = {str(path)!r} is not a file; give a JSONL file, or make the quickstart's "
                "with `april make-data`"
            )
