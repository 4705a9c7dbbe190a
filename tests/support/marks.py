"""Marks of tests that need another environment or program, or are left out of the short form."""

import pytest

SERVERS = {
    "sglang": ".venv-sglang/bin/python",
    "vllm": ".venv-vllm/bin/python",
    "verl": ".venv-verl/bin/python",
    "megatron": ".venv-megatron/bin/python",
    "browser": "/usr/bin/chromium",
    "slurm": "/usr/sbin/slurmctld",
    "ray": ".venv-ray/installed",
    "helm": ".venv-helm/helm",
    "kubectl": ".venv-helm/kubectl",
    "prometheus": ".venv-prometheus/usr/bin/prometheus",
    "sinks": ".venv-sinks/installed",
    "store": ".venv-store/installed",
}
"""Marks of tests that need another environment or program, and its path."""


def full(value, **options):
    """A parameter that the short form of the suite leaves out."""
    return pytest.param(value, marks=pytest.mark.full, **options)
