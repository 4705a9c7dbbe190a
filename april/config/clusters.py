"""The keys of `[launch]`: how `april launch` asks a cluster's own engine for the machines of a run."""

from pydantic import Field

from april.config.section import Section


class LaunchSection(Section):
    on: str = Field(
        "local",
        description="what places the parts: local, ssh, slurm, kubernetes, helm, ray, or yours as package.module:Class",
    )
    hosts: list[str] = Field([], description="ssh: machines, the first for the broker and the first learner ranks")
    ssh: list[str] = Field(
        ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"],
        description="ssh: command, with its options, that reaches a machine",
    )
    learner_nodes: int = Field(1, ge=1, description="machines over which learner.ranks are spread evenly")
    cores: int = Field(4, ge=1, description="of a worker and of a learner rank each")
    memory_gb: int = Field(32, ge=1, description="of a worker and of a learner rank each (GiB)")
    port: int = Field(5555, ge=1024, le=65534, description="of the broker; the learner's ranks meet at the next one")
    account: str = Field("", description="slurm: whom the time is charged to; none: yours by default")
    partition: str = Field("", description="slurm: of the nodes; none: the cluster's default")
    cpu_partition: str = Field(
        "",
        description="slurm: of nodes without accelerators, for broker, scorers and agents; none: as for the others",
    )
    time: str = Field("", description="slurm: longest job, as its --time; the run goes on in the next; none: no limit")
    image: str = Field("", description="kubernetes: container image with April in it")
    namespace: str = Field("default", description="kubernetes: of all objects")
    volume: str = Field("", description="kubernetes: claim of a volume that all pods can write, mounted at run.dir")
    journal_gb: int = Field(
        0,
        ge=0,
        description="kubernetes: size of a volume of the broker's own, for the journal (GiB); 0: on the shared one",
    )
    journal_class: str = Field("", description="kubernetes: storage class of that volume; none: the cluster's default")
    accelerator: str = Field(
        "nvidia.com/gpu", description="kubernetes: resource name of an accelerator, amd.com/gpu on AMD"
    )
    user: int = Field(1000, ge=0, description="kubernetes: number of the user, and of the group, that pods run as")
    labels: dict[str, str] = Field(
        {}, description="kubernetes: of parts and their pods, as kueue.x-k8s.io/queue-name for a queue of Kueue's"
    )
    annotations: dict[str, str] = Field(
        {}, description="kubernetes: of pods, as kueue.x-k8s.io/podset-preferred-topology"
    )
    priority_class: str = Field("", description="kubernetes: of pods; none: the cluster's default")
    monitor: bool = Field(
        False, description="kubernetes: PodMonitor and alert rules for Prometheus' operator, a dashboard for Grafana's"
    )
    setup: list[str] = Field([], description="shell lines before each part, such as `module load` or an activate")
    environment: dict[str, str] = Field({}, description="variables of each part")
