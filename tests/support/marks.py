"""Marks (pytest) of tests that need another environment or program, or are left out of the short test suite."""

import pytest

SERVERS = {
    "sglang": ".venv-sglang/bin/python", "vllm": ".venv-vllm/bin/python", "verl": ".venv-verl/bin/python",
    "megatron": ".venv-megatron/bin/python", "browser": "/usr/bin/chromium", "slurm": "/usr/sbin/slurmctld",
    "ray": ".venv-ray/installed", "helm": ".venv-helm/helm", "prometheus": ".venv-prometheus/usr/bin/prometheus",
    "sinks": ".venv-sinks/installed", "store": ".venv-store/installed",
}  # fmt: skip
"""Path of the environment or program that tests with a pytest mark need, by the mark's name."""


def full(value, **options):
    """A test parameter that the short test suite leaves out."""
    return pytest.param(value, marks=pytest.mark.full, **options)
