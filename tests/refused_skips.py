"""A pytest plugin (`-p tests.refused_skips`): a test that is skipped, but for want of a GPU, fails the suite."""

import pytest

NEEDS_GPU = "needs a GPU"
"""The one reason for which a test may be skipped."""
refused = set()
"""Other reasons for which tests were skipped."""


def pytest_runtest_logreport(report):
    if report.skipped and (reason := report.longrepr[2].removeprefix("Skipped: ")) != NEEDS_GPU:
        refused.add(reason)


pytest_collectreport = pytest_runtest_logreport


def pytest_sessionfinish(session):
    if refused:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    for reason in sorted(refused):
        terminalreporter.write_line(f"tests may be skipped for want of a GPU alone, not because: {reason}", red=True)
