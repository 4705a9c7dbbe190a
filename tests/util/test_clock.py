"""The clock of all deadlines is Unix time and does not jump."""

import runpy
import time

import pytest

from april.util import clock

HOUR_S, YEAR_S = 3600.0, 365 * 86400.0


def test_the_clock_is_unix_time():
    fresh = runpy.run_path(clock.__file__)["now"]
    assert abs(fresh() - time.time()) < HOUR_S


@pytest.mark.parametrize("jump_s", [-YEAR_S, YEAR_S])
def test_the_clock_ignores_jumps_of_the_system_clock(monkeypatch, jump_s):
    real, before = time.time, clock.now()
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert 0 <= clock.now() - before < HOUR_S
