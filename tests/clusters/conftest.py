"""Processes that are ended with their test."""

from tests.run.conftest import start  # noqa: F401
