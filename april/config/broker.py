"""The keys of `[broker]`, `[weights]`, `[security]` and `[operations]`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from april.config.section import AUTO, Section
from april.util.registry import registry_of

IPC = "ipc"
"""Value of `broker.bind` for a Unix socket in a folder that only this user can enter."""


class BrokerSection(Section):
    bind: str = Field(
        IPC,
        description="Endpoint that the broker listens on: ipc, a Unix socket that only this user's processes on this "
        "machine reach; or tcp://INTERFACE:PORT, * for a free port, where peers need keys (security.keys).",
    )
    lease_s: float = Field(
        60.0,
        gt=0,
        description="Time that a lease on a sample is valid without renewal (seconds). A high value takes work back "
        "from a silent worker late.",
    )
    renew_s: float = Field(
        15.0,
        gt=0,
        description="Interval at which workers renew their leases; below lease_s (seconds). A low value sends more, as "
        "each renewal lists all leases of a worker; near lease_s a single late renewal loses them.",
    )
    session_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Time of silence after which a worker, scorer or agents process counts as lost and its leases end "
        "(seconds); for the learner, see learner.hung_s. A high value detects a dead worker late; a low one drops a "
        "worker in a long prefill.",
    )
    attempts: int = Field(
        5,
        ge=1,
        description="Lost or failed leases after which a sample fails for good and goes to the dead letters. Each "
        "attempt generates or scores it once more.",
    )
    abort_deadline_s: float = Field(
        5.0,
        gt=0,
        description="Longest wait at a round's end for workers to hand back aborted samples, before the next round "
        "(seconds). A high value lets one slow worker delay the round.",
    )
    readopt_s: float = Field(
        10.0,
        gt=0,
        description="Time after a restart of the broker in which former holders may reclaim their leases (seconds). "
        "Work of dead workers waits that long.",
    )
    credit_mb: int = Field(
        64,
        ge=1,
        description="Flow control: data that the broker sends to a peer ahead of its acknowledgements (MiB). It "
        "bounds the broker's memory for each peer; a low value slows large batches.",
    )
    journal_dir: Path | None = Field(
        None,
        description="Folder, on a fast disk of its own, for the journals of runs, each below its run's name. Journal "
        "syncs then do not wait for checkpoints. Unset: in the run's folder.",
    )
    journal_file_mb: int = Field(
        512,
        ge=1,
        description="Size at which the broker takes a snapshot and starts a new journal file (MiB). A restart "
        "replays at most one file; small files take more snapshots.",
    )
    journal_file_records: int = Field(
        500_000,
        ge=100,
        description="Number of records after which the broker takes a snapshot and starts a new journal file. A "
        "restart replays at most one file; few records take more snapshots.",
    )
    patience_s: float = Field(
        600.0,
        gt=0,
        description="Time that peers wait for a broker that does not answer, before they end (seconds). A high value "
        "holds their machines that long.",
    )
    max_restarts: int = Field(
        5,
        ge=0,
        description="Restarts of the broker in a row without a new policy step, after which the run fails. A low "
        "value ends the run at a fault that would have passed, a high one spends long on one that will not.",
    )
    hung_s: float = Field(
        120.0,
        gt=0,
        description="Time without an answer after which `april run` kills and restarts the broker (seconds). A high "
        "value detects a hang late.",
    )
    max_run_s: float = Field(
        3600.0,
        gt=0,
        description="Longest time that a lease is held, however often it is renewed (seconds). A low value "
        "interrupts long responses, and each interruption counts as an attempt.",
    )


class WeightsSection(Section):
    transport: str = Field(
        "collective",
        description="How new weights reach the workers: collective (broadcast over process groups), shared_memory "
        "(copied through memory; learner and workers are on one machine), cuda_ipc (copied within the accelerator that "
        "learner and worker share), pull (workers read snapshots in "
        "weights.folder), external (your framework loads them into the servers), or yours as package.module:Class.",
    )
    host: str = Field(
        AUTO,
        description="Address at which workers reach learner rank 0 for weights, which travel unencrypted. auto: the "
        "learner's address on the route to the broker.",
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto",
        description="Collective backend that broadcasts weights: gloo goes through host memory, nccl (RCCL on AMD) "
        "takes one rank per accelerator. auto: nccl between accelerators, otherwise gloo.",
    )
    publish_deadline_s: float = Field(
        10.0,
        gt=0,
        description="Longest wait of the learner, in each step, for workers to take new weights (seconds). A slower "
        "worker gets them later. A high value lets one slow worker hold up training.",
    )
    join_deadline_s: float = Field(
        5.0,
        gt=0,
        description="Longest time to build the weight channel to a worker (seconds). A high value detects an "
        "unreachable worker late.",
    )
    transfer_deadline_s: float = Field(
        30.0,
        gt=0,
        description="Longest transfer of one version to a worker (seconds). A slower worker loses its weight channel "
        "and joins again; a high value detects a hung one late.",
    )
    channel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="Most workers in a chain. The learner sends a version to the first, and each forwards to the next "
        "what it receives, while it receives it: the learner's network then carries a copy for each chain instead "
        "of one for each worker. In a long chain a worker that fails delays more of the others; workers have to reach "
        "each other as they reach the learner.",
    )
    folder: str = Field(
        AUTO,
        description="Folder, or fsspec URL of an object store such as s3://bucket/folder, for the snapshots of weights "
        "that transport = 'pull' writes and workers read; each run's are below its name. auto: weights/ in the "
        "run's folder, which workers on other machines have to see.",
    )
    every: int = Field(
        1,
        ge=1,
        description="Interval at which transport = 'pull' writes a snapshot (policy steps). A high value saves writing "
        "and makes tokens older; above 1 only for a schedule without rounds and without held-out prompts, "
        "and at most schedule.max_staleness.",
    )
    delta: Literal["off", "auto"] = Field(
        "off",
        description="Form in which new weights travel: off: whole each time; auto: only what has changed, since the "
        "version before for workers that have it, or since the last snapshot of transport = 'pull'. With auto, "
        "learner and workers keep one more copy of the weights. It saves much if weights are published in 16 bits, "
        "and little in float32. Adapters, and what inference servers receive themselves, are sent whole.",
    )
    whole_every: int = Field(
        8,
        ge=2,
        le=100,
        description="Interval of whole snapshots of transport = 'pull' with delta = 'auto', in snapshots. A high value "
        "saves writing; a worker that joins reads the last whole one and all deltas since.",
    )
    senders: Literal["auto", "rank_0", "all"] = Field(
        AUTO,
        description="Learner ranks that send weights: all, each a part of them; or rank_0, which gathers the whole "
        "model in its memory. auto: all, but rank_0 where workers do not reach every machine of the learner, and "
        "where inference servers receive the weights themselves. Sending by all ranks has run over gloo and shared "
        "memory, not over nccl.",
    )
    bucket_mb: int = Field(
        16,
        ge=1,
        description="Size of one broadcast of weights (MiB). A large bucket takes accelerator memory for its copy; "
        "small ones make more broadcasts. shared_memory divides buckets further.",
    )
    canary: bool = Field(
        True,
        description="Weight check: before a worker gets leases of a version, its engine must score a text of up to "
        "512 tokens as the learner does. It costs engine and learner a forward pass of that text in each version, and "
        "the learner a second one in every eighth.",
    )


class SecuritySection(Section):
    keys: Path | Literal["auto", "off"] = Field(
        AUTO,
        description="Folder written by `april keygen`, or one part's key file: peers are authenticated and messages "
        "encrypted, which leaves two thirds of the broker's throughput. auto: made in the run's folder if the broker "
        "listens on TCP. off: whoever reaches its port, on loopback every user of the machine, takes part in the run.",
    )
    max_sessions: int = Field(
        4096,
        ge=1,
        description="Most peers connected to the broker; more are refused. Each takes about 168 KB of its memory. A "
        "sixteenth is reserved for the learner's processes, another for monitors.",
    )
    max_key_sessions: int = Field(
        3328,
        ge=1,
        description="Most peers connected with one key, or without keys in one role; more are refused. A low value "
        "refuses workers that share a key, as those do that April launches; a high one lets one key take the sessions "
        "of others. By default a sixteenth of max_sessions is left to other keys, besides the reserved ones.",
    )
    max_leases: int = Field(
        4096,
        ge=1,
        le=16384,
        description="Most leases of one worker, whatever capacity it states. Each sample in flight takes about 1.6 "
        "KB of the broker's memory.",
    )


HostName = Annotated[str, Field(pattern=r"^[^:/\s]+$")]


class OperationsSection(Section):
    http: str = Field(
        "127.0.0.1:0",
        description="HOST:PORT at which the broker serves /metrics and /health; port 0 picks a free one; none: not "
        "served. Beyond loopback it is open to whoever reaches the port.",
    )
    http_hosts: list[HostName] = Field(
        [],
        description="Host names by which clients address /metrics and /health, besides IP addresses, the machine's "
        "name and that in operations.http: such as an alias in DNS, or a Service's name.",
    )
    stuck_after_s: float = Field(
        30.0,
        gt=0,
        description="Time without a pass of the broker's main loop after which /health fails (seconds). A high value "
        "reports a stuck broker late; a low one alarms at a slow disk.",
    )
    sinks: list[str] = Field(
        [],
        description="Where metrics go in addition to the run folder: tensorboard, wandb, mlflow, trackio, swanlab, "
        "or yours as package.module:Class, whose calls take time in the broker's loop.",
    )
    alarms: list[str] = Field(
        default_factory=lambda: list(registry_of("operations.alarms").shipped),
        description="Alarms that watch for trouble in the run, by default all that ship; also yours as "
        "package.module:Class, beside the names of those that you keep. Their calls take time in the broker's loop.",
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Format of log lines: text, or json (one object a line, with ids)."
    )

    @property
    def http_address(self) -> tuple[str, int] | None:
        """(host, port) of the HTTP server; None if there is to be none."""
        host, _, port = self.http.rpartition(":")
        return None if self.http == "none" else (host, int(port))
