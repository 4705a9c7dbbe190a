"""The keys of what generates, answers and scores: workers, their engines, rewards, scorers, environments, agents."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from april.config.section import NAME_OR_FILE, Section
from april.wire.limits import CHUNK_TOKENS


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
    one_numa_node: bool = Field(False, description="refuse a plan by which a worker has accelerators of several nodes")
    hung_s: float = Field(600.0, gt=0, description="one that is absent or gets nowhere for so long is ended (seconds)")


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
    pace: Annotated[str, NAME_OR_FILE] = Field(
        "", description="hardware whose time a paced engine keeps: h100, mi300x, cpu, or a cost model's file"
    )
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
    code_memory_mb: int = Field(1024, ge=64, description="memory of such a program with all it starts (MiB)")
    code_isolation: Literal["best", "strict"] = Field(
        "best", description="what keeps a program from the host: all that this one permits; strict: or nothing starts"
    )
    over_limit: Literal["failed", "wrong"] = Field(
        "wrong", description="a response that no verifier can decide within its limits is wrong, or is tried again"
    )
    max_failed_share: float = Field(
        0.05, ge=0, le=1, description="of the prompts, that may have failed for good in a run that ends well; 1: all"
    )
    allowed: list[str] = Field([], description="verifiers that rows of the data may name; none given: those that ship")


class ScorerSection(Section):
    """Processes that only score; reward.where = 'scorer'."""

    count: int = Field(1, ge=1, description="scorer processes that `april run` starts")
    leases: int = Field(64, ge=1, description="responses, or groups that are scored together, taken at a time")
    max_restarts: int = Field(3, ge=0, description="restarts of each scorer that bring nothing before giving up")
    hung_s: float = Field(600.0, gt=0, description="one that is absent or gets nowhere for so long is ended (seconds)")


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

    program: str = Field(
        "", description="gymnasium, verifiers, or a function of a session as package.module:function; empty: no agents"
    )
    options: dict[str, Any] = Field(
        {}, description="what a program that is a class is made of, once in each process that runs it"
    )
    command: list[str] = Field(
        [], description="a process for each session in its place, such as ['python', 'agent.py']"
    )
    attach: bool = Field(False, description="an outside harness comes for the sessions over HTTP")
    count: int = Field(1, ge=1, description="agents processes that `april run` starts")
    sessions: int = Field(64, ge=1, description="sessions that one of them has open at a time")
    listen: str = Field(
        "127.0.0.1:0", description="HOST:PORT of the API; port 0: any that is free; beyond this machine over TLS alone"
    )
    ssl_certfile: Path | None = Field(None, description="PEM file of the API's certificate, and of those that sign it")
    ssl_keyfile: Path | None = Field(None, description="PEM file of the certificate's key, without a passphrase")
    public_url: str = Field(
        "", description="https://HOST:PORT that others reach the API under; with no certificate a proxy ends TLS there"
    )
    attach_keyfile: Path | None = Field(
        None, description="file of mode 0600 with the key that a harness shows when it comes for sessions"
    )
    timeout_s: float = Field(600.0, gt=0, description="a session is ended after this long (seconds)")
    chat_template: str = Field("", description="Jinja text in place of the tokeniser's own chat template")
    response_template: dict[str, Any] = Field(
        {}, description="how answers are parsed into texts and tool calls; none: the tokeniser's own, or not at all"
    )
    max_turn_tokens: int | None = Field(None, ge=1, description="of a turn whose request names none; none: all")
    history: Literal["stored", "template"] = Field(
        "stored", description="earlier messages keep their tokens, or are rendered anew as a deployed model reads them"
    )
    replay: Literal["answer", "discard"] = Field(
        "answer", description="a program that is run again is answered from the journal; or its session is discarded"
    )
    overrides: Literal["refuse", "ignore"] = Field(
        "refuse", description="what becomes of requests that would change the distribution, such as a temperature"
    )
    max_restarts: int = Field(3, ge=0, description="restarts of each process that bring nothing before giving up")
    hung_s: float = Field(600.0, gt=0, description="`april run` restarts one absent for this long (seconds)")

    @property
    def is_set(self) -> bool:
        return bool(self.program or self.command or self.attach)
