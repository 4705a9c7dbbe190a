"""Launchers for clusters: each submits the parts of a run to a scheduler, which places, queues and restarts them."""

from april.util.registry import Registry

LAUNCHERS = Registry(
    "launch.on",
    "place to launch on",
    {
        "local": "april.launch.clusters.shells:Local",
        "ssh": "april.launch.clusters.shells:SSH",
        "slurm": "april.launch.clusters.slurm:Slurm",
        "kubernetes": "april.launch.clusters.kubernetes:Kubernetes",
        "helm": "april.launch.clusters.kubernetes:Helm",
        "ray": "april.launch.clusters.ray:Ray",
    },
    base="april.launch.clusters.launcher:Launcher",
)
