"""The keys of `[worker]`, `[engine]`, `[scorer]`, `[teacher.NAME]`, `[environment]` and `[agent]`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from april.config.section import NAME_OR_FILE, Section
from april.wire.limits import MAX_CHUNK_TOKENS, MAX_TEACHER_TOP_K


class WorkerSection(Section):
    count: int = Field(
        2,
        ge=1,
        description="Generation workers that `april run` starts, each with its own engine and copy of the weights.",
    )
    engine: str = Field(
        "torch",
        description="Generation engine: torch (in the worker's process; slow on large models), transformers (any "
        "model that transformers has a class for; slower), paced (imitates the speed of engine.pace), sglang, vllm, "
        "or yours as package.module:Class. Servers are configured under [engine].",
    )
    slots: int = Field(
        64,
        ge=1,
        description="Sequences that a worker decodes together. More raise throughput and KV cache, and slow each "
        "sequence.",
    )
    prefetch: int = Field(
        8,
        ge=0,
        description="Samples that wait in a worker for a free slot. More hide the broker's latency, but may leave "
        "another worker idle.",
    )
    report_s: float = Field(
        2.0,
        gt=0,
        description="Interval at which a worker sends the new tokens of all its sequences to the broker (seconds). A "
        "killed worker loses what it had not sent; short intervals load the broker, which at 2 s serves about 180 "
        "GPUs of 256 sequences.",
    )
    chunk_tokens: int = Field(
        512,
        ge=1,
        le=MAX_CHUNK_TOKENS,
        description="New tokens of one sequence that are sent without waiting for the end of report_s. A killed "
        "worker loses what it had not sent; a small value loads the broker.",
    )
    unacked_mb: int = Field(
        64,
        ge=1,
        description="Data that a worker may have sent without the broker having it on disk, before it pauses (MiB). "
        "A high value takes memory while the broker is slow; a low one stops generation sooner.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="Restarts of a worker in a row in which it delivers nothing, after which the run fails. A low "
        "value ends the run at a fault that would have passed, a high one spends long on one that will not.",
    )
    threads: int = Field(
        1,
        ge=1,
        description="CPU threads of an engine. More speed up its work on a CPU; other parts do not have these cores.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device of an engine in the worker's process. auto: an accelerator where there is one, otherwise "
        "the CPU.",
    )
    one_numa_node: bool = Field(
        False,
        description="Refuse a placement in which a worker's accelerators are on several NUMA nodes, between "
        "which transfers are slower; false: allow it.",
    )
    hung_s: float = Field(
        600.0,
        gt=0,
        description="Time without a sign of progress after which a worker is killed and restarted (seconds). A high "
        "value detects a hang late; a low one kills a worker that starts slowly.",
    )


class EngineSection(Section):
    """Inference servers of a worker: SGLang or vLLM. Also the speed of a paced engine."""

    url: list[str] = Field(
        [],
        description="Addresses of running inference servers, as http://HOST:PORT,http://HOST:PORT; you keep them "
        "running, and each serves one worker. Empty: workers start their own.",
    )
    servers: int = Field(
        1,
        ge=1,
        le=64,
        description="Inference servers that a worker starts. Each takes accelerators and a copy of the weights from "
        "the learner.",
    )
    python: Path | None = Field(
        None,
        description="Python interpreter that has the server's package installed. Unset: that of the environment "
        ".venv-ENGINE, such as .venv-sglang.",
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the server that a worker starts; further servers use the next ports. 0: any free port.",
    )
    server: dict[str, Any] = Field(
        {}, description="Options passed on to the server, as --engine.server.OPTION VALUE; true is a bare flag."
    )
    start_s: float = Field(
        600.0,
        gt=0,
        description="Longest start of a server (seconds). A high value detects a server that never starts late.",
    )
    stall_s: float = Field(
        120.0,
        gt=0,
        description="Time without output while requests run, after which a server counts as hung and is restarted "
        "(seconds). A low value restarts a server that is only busy.",
    )
    update_s: float = Field(
        120.0,
        gt=0,
        description="Longest load of new weights in a server (seconds); beyond it the server is restarted, and tokens "
        "not yet streamed are lost. A high value detects a hung load late.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="Restarts of a server in a row in which it finishes nothing, after which its worker ends. A low "
        "value ends the worker at a fault that would have passed, a high one spends long on one that will not.",
    )
    stream_tokens: int = Field(
        32,
        ge=1,
        description="Tokens in one event of the server's output stream. A dead server loses what it had not "
        "streamed; a small value takes CPU time.",
    )
    pause: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="Treatment of running requests while weights change: abort ends them and submits them again, "
        "retract lets them wait in the server; both prefill their contexts again. in_place keeps the KV cache of "
        "older weights, so that log-probabilities fit neither version. All but abort need stream_tokens = 1.",
    )
    weights: Literal["disk", "tensor", "broadcast"] = Field(
        "disk",
        description="How new weights enter the server: disk (a snapshot file for each server), tensor (shared "
        "memory), broadcast (collectives from the learner, over a network between the two).",
    )
    snapshot_dir: Path | None = Field(
        None,
        description="Folder of the snapshots of engine.weights = 'disk', with room for the weights once per server. "
        "Unset: shared memory, otherwise the system's temporary folder.",
    )
    pace: Annotated[str, NAME_OR_FILE] = Field(
        "",
        description="Hardware whose speed a paced engine imitates: h100, mi300x, cpu, or the file of a cost model. "
        "The run lasts as long as it would there, times pace_factor.",
    )
    pace_factor: float = Field(
        1.0,
        gt=0,
        description="Seconds that pass for each second of the imitated hardware. A high value makes the run last "
        "longer; with a low one this machine cannot make the decode steps in time.",
    )

    @field_validator("url", mode="before")
    @classmethod
    def split_addresses(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @property
    def paced(self) -> str:
        """Hardware that the engines imitate, with the time factor, as reports show it; empty without pacing."""
        return f"{self.pace} x {self.pace_factor:g}" if self.pace else ""

    @property
    def tensor_ranks(self) -> int:
        """Tensor-parallel size of each inference server that a worker starts, read from the options in
        `engine.server`."""
        return int(self.server.get("tp_size", self.server.get("tensor_parallel_size", 1)))


class ScorerSection(Section):
    """Processes that only score responses, with `reward.where = "scorer"`."""

    count: int = Field(
        1,
        ge=1,
        description="Scorer processes that `april run` starts, each with reward.processes verifier "
        "processes. More score more responses at a time, on more cores.",
    )
    leases: int = Field(
        64,
        ge=1,
        description="Responses, or groups scored as a whole, that a scorer takes at a time. They are scored again "
        "when it dies.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="Restarts of a scorer in a row in which it delivers nothing, after which the run fails. A low "
        "value ends the run at a fault that would have passed, a high one spends long on one that will not.",
    )
    hung_s: float = Field(
        600.0,
        gt=0,
        description="Time without a sign of progress after which a scorer is killed and restarted (seconds). A high "
        "value detects a hang late.",
    )


class TeacherSection(Section):
    """A model that teaches the policy at each token. Either scorers (`reward.where = "scorer"`) ask it for the
    log-probabilities of the sampled tokens, which become a token score called NAME; or the learner holds it."""

    kind: str = Field(
        "transformers",
        description="Kind of teacher: transformers (a model folder, computed by each scorer in a process of its own, "
        "which takes the model's memory), or a server: sglang, vllm or openai (completions with echo).",
    )
    path: Path = Field(
        description="Hugging Face folder of the teacher. For a server: a folder with its tokeniser, which must be "
        "that of the policy.",
    )
    where: Literal["scorer", "learner"] = Field(
        "scorer",
        description="Process that computes the teacher: scorer, for algorithm.distillation, and for "
        "algorithm.divergence over its top_k; learner, which holds a model folder on its own ranks, for "
        "algorithm.divergence over the whole vocabulary.",
    )
    top_k: int = Field(
        0,
        ge=0,
        le=MAX_TEACHER_TOP_K,
        description="Number of most likely ids at each sampled token whose log-probabilities scorers also ask the "
        "teacher for. algorithm.divergence compares the policy with them. A high value leaves out less of the "
        "distribution, and takes 8 bytes per id and token. 0: none.",
    )
    url: str = Field("", description="Address of the server, http://HOST:PORT. Empty for a model folder.")
    url_key_variable: str = Field(
        "",
        pattern=r"^([A-Za-z_]\w*)?$",
        description="Name of the environment variable of scorers with the server's key, sent as a bearer token. Empty: "
        "none.",
    )
    model: str = Field(
        "",
        description="Name of the model that requests ask for, for a server that has several, such as vllm or openai. "
        "Empty: none is named.",
    )
    device: str = Field(
        "cpu",
        description="Device of a teacher in a model folder: cpu, or an accelerator as cuda:1, whose memory the "
        "model takes.",
    )
    processes: int = Field(
        1,
        ge=1,
        description="Processes of each scorer that ask the teacher. More score more responses at a time; each holds "
        "the model if it is a model folder.",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="Longest time for one response, loading of the model included (seconds). After it the response is "
        "scored again. A high value waits long for a server that hangs.",
    )


class EnvironmentSection(Section):
    """A function that answers the policy between turns of a response."""

    name: str = Field(
        "",
        description="Environment that answers the policy after each turn: one that ships, or yours as "
        "package.module:function. A sample that waits for its answer holds no decode slot. Empty: single-turn "
        "responses.",
    )
    turn_ends: list[str] = Field(
        [], description="Texts of one token each that end a turn of the policy, such as a closing tag."
    )
    max_turn_tokens: int | None = Field(
        None,
        ge=1,
        description="Sampled tokens after which a turn ends. A high value lets one turn use up the response's budget. "
        "Unset: all that is left of that budget.",
    )
    max_observation_tokens: int = Field(
        512,
        ge=1,
        le=MAX_CHUNK_TOKENS,
        description="Longest answer of the environment (tokens); the rest is cut off. Answers take from the "
        "response's budget and from the KV cache.",
    )
    timeout_s: float = Field(
        10.0,
        gt=0,
        description="Time after which a call of the environment is killed (seconds). A high value waits long for one "
        "that hangs; a low one fails slow ones.",
    )
    failure_text: str = Field(
        "",
        description="Text that the policy reads, and learns from, where a call fails. Empty: the sample is handed "
        "back and tried again.",
    )
    keep_special_tokens: bool = Field(
        True,
        description="Whether the environment sees the special tokens of a turn, such as a tool call's; an end token at "
        "its end is left out in any case.",
    )
    processes: int = Field(
        1,
        ge=1,
        description="Environment processes of each worker. More answer more turns at a "
        "time; each takes its own memory.",
    )
    memory_mb: int = Field(
        4096,
        ge=256,
        description="Largest address space of an environment process (MiB). A low value fails calls that need more.",
    )


class AgentSection(Section):
    """A program of your own that speaks with the policy over HTTP. Give one of `program`, `command` and `attach`."""

    program: str = Field(
        "",
        description="Agent that speaks with the policy over HTTP: gymnasium, verifiers, or yours as "
        "package.module:function, called with a session. Empty: no agents.",
    )
    options: dict[str, Any] = Field(
        {},
        description="Keyword arguments of an agent program that is a class; it is instantiated once in each process.",
    )
    command: list[str] = Field(
        [],
        description="Command that is started as a process for each session instead of agent.program, such as "
        "['python', 'agent.py'].",
    )
    attach: bool = Field(
        False,
        description="An external harness requests sessions over HTTP; April starts no program. Sessions that nobody "
        "requests hold up their groups.",
    )
    count: int = Field(
        1,
        ge=1,
        description="Processes for agent sessions that `april run` starts, each with its own HTTP server and agent "
        "programs. Each takes its own memory.",
    )
    sessions: int = Field(
        64,
        ge=1,
        description="Sessions that one agents process has open at a time, each a sample in flight. Too few leave "
        "decode slots idle while tools run.",
    )
    listen: str = Field(
        "127.0.0.1:0",
        description="HOST:PORT that the agents' API listens on; port 0: any free one. Beyond loopback it needs TLS.",
    )
    ssl_certfile: Path | None = Field(
        None, description="PEM file of the API's TLS certificate, followed by the certificates that sign it."
    )
    ssl_keyfile: Path | None = Field(
        None, description="PEM file of the TLS certificate's private key, without a passphrase."
    )
    public_url: str = Field(
        "",
        description="https://HOST:PORT at which others reach the API. Without a certificate, a proxy at that address "
        "ends TLS.",
    )
    attach_keyfile: Path | None = Field(
        None, description="File of mode 0600 with the key that a harness has to show when it asks for sessions."
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="Longest session (seconds); a longer one is ended and starts anew. A session that hangs holds up "
        "its group this long.",
    )
    chat_template: str = Field("", description="Jinja text used instead of the tokeniser's own chat template.")
    response_template: dict[str, Any] = Field(
        {},
        description="How answers are parsed into text and tool calls: an object like the attribute response_template "
        "of a transformers tokeniser. Parsed answers are streamed in one piece. Empty: that attribute; no parsing "
        "where the tokeniser has none.",
    )
    max_turn_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest answer to a request that names no limit (tokens). A high value lets one answer use up "
        "the response's budget. Unset: all that is left of that budget.",
    )
    history: Literal["stored", "template"] = Field(
        "stored",
        description="How earlier messages of a session reach the policy: stored keeps their sampled tokens, template "
        "renders them anew as a deployed model reads them, which forks the session wherever tokens differ.",
    )
    replay: Literal["answer", "discard"] = Field(
        "answer",
        description="Treatment of a session whose agent is run again after a crash: answer repeats the recorded "
        "answers from the journal, discard drops the session and its tokens.",
    )
    overrides: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="Treatment of a request that would change the sampling distribution, such as its temperature: "
        "refuse rejects the request, ignore drops that option.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="Restarts of an agents process in a row in which it delivers nothing, after which the run fails. "
        "A low value ends the run at a fault that would have passed, a high one spends long on one that will not.",
    )
    hung_s: float = Field(
        600.0,
        gt=0,
        description="Time without an answer after which `april run` kills and restarts an agents process (seconds). "
        "Its sessions wait that long.",
    )

    @property
    def is_set(self) -> bool:
        return bool(self.program or self.command or self.attach)
