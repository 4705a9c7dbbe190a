"""The keys of `[launch]` and `[devices]`: what `april launch` asks a cluster's scheduler for, and how learner and
engines share accelerators."""

from pydantic import Field

from april.config.section import Section


class LaunchSection(Section):
    """Resources that `april launch` requests from a cluster's scheduler."""

    on: str = Field(
        "local",
        description="Cluster that `april launch` starts the parts of a run on: local, ssh, slurm, kubernetes, helm, "
        "ray, or yours as package.module:Class. kubernetes and helm need a folder of security.keys.",
    )
    hosts: list[str] = Field(
        [],
        description="For ssh, which needs them: machines that the parts run on. The first one gets the broker and the "
        "first learner ranks.",
    )
    ssh: list[str] = Field(
        ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"],
        description="For ssh: command line, with its options, that reaches a machine.",
    )
    learner_nodes: int = Field(
        1,
        ge=1,
        description="Machines over which learner.ranks are spread evenly. Above 1, gradients cross the network in "
        "each step, and without a shared file system checkpoints do too and take twice the disk.",
    )
    cores: int = Field(
        4,
        ge=1,
        description="CPU cores requested for each worker and for each learner rank. A high value fits on fewer "
        "machines.",
    )
    memory_gb: int = Field(
        32,
        ge=1,
        description="Memory requested for each worker and for each learner rank (GiB). A high value fits on fewer "
        "machines.",
    )
    port: int = Field(
        5555,
        ge=1024,
        le=65534,
        description="TCP port of the broker; the learner's ranks rendezvous at the next one. Both have to be open "
        "between the machines.",
    )
    account: str = Field("", description="For slurm: account that the time is charged to. Empty: your default account.")
    partition: str = Field("", description="For slurm: partition of the nodes. Empty: the cluster's default.")
    cpu_partition: str = Field(
        "",
        description="For slurm: partition of nodes without accelerators, for broker, scorers and agents; the job "
        "starts once nodes of both partitions are free. Empty: the other parts' partition.",
    )
    time: str = Field(
        "",
        description="For slurm: time limit of a job, in the format of sbatch --time; at the limit the run stops in "
        "order and goes on in a further job. Empty: no limit.",
    )
    image: str = Field("", description="For kubernetes: container image that has April installed.")
    namespace: str = Field("default", description="For kubernetes: namespace of all objects of the run.")
    volume: str = Field(
        "",
        description="For kubernetes: persistent volume claim that all pods can write, mounted at run.dir. Everything "
        "the run writes goes through it.",
    )
    journal_gb: int = Field(
        0,
        ge=0,
        description="For kubernetes: size of a volume of the broker's own for the journal (GiB), which stays when "
        "the run is deleted. 0: the journal is on the shared volume and waits for its syncs.",
    )
    journal_class: str = Field(
        "", description="For kubernetes: storage class of the journal's volume. Empty: the cluster's default."
    )
    accelerator: str = Field(
        "nvidia.com/gpu", description="For kubernetes: resource name of an accelerator; amd.com/gpu on AMD."
    )
    user: int = Field(1000, ge=0, description="For kubernetes: user id and group id that pods run as.")
    labels: dict[str, str] = Field(
        {},
        description="For kubernetes: labels of all objects and their pods, such as kueue.x-k8s.io/queue-name for a "
        "queue of Kueue.",
    )
    annotations: dict[str, str] = Field(
        {}, description="For kubernetes: annotations of the pods, such as kueue.x-k8s.io/podset-preferred-topology."
    )
    priority_class: str = Field(
        "",
        description="For kubernetes: priority class of the pods; pods of lower classes may be evicted for them. "
        "Empty: the cluster's default.",
    )
    monitor: bool = Field(
        False,
        description="For kubernetes: create a PodMonitor and alert rules for the Prometheus operator, and a "
        "dashboard for Grafana's; nothing is applied where that operator is not installed.",
    )
    setup: list[str] = Field(
        [],
        description="Shell lines run before each part starts, such as `module load` or an activate. They take their "
        "time at each restart.",
    )
    environment: dict[str, str] = Field(
        {},
        description="Environment variables of each part, as NAME = VALUE. They are written to the run's files: put "
        "no secrets here.",
    )


class DevicesSection(Section):
    """Sharing of one machine's accelerators by the learner and the engines that `april run` places on them."""

    share: bool = Field(
        False,
        description="Place the learner and the engines on the same accelerators and divide their memory. Fewer "
        "accelerators are needed; both slow down while both compute, and weights go through host memory.",
    )
    turns: bool = Field(
        False,
        description="Time sharing: engines and learner use the shared accelerators one after the other, each with "
        "all of the memory, the other's state offloaded to the host. Nothing is generated while the learner "
        "trains.",
    )
    turn_s: float = Field(
        1200.0,
        gt=0,
        description="Longest wait of engines or learner for the other side to release the accelerators (seconds). A "
        "high value detects a hung side late; a low one can end a learner that waits for an evaluation.",
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="Memory to divide on each shared accelerator (GiB). A low value leaves the rest unused. Unset: "
        "the memory of this machine's accelerators.",
    )
