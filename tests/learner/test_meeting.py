"""The machines of a learner find each other by the broker, and say so where that cannot be."""

from types import SimpleNamespace

import pytest

from april import wire
from april.learner.meeting import asked


def answering(places):
    return SimpleNamespace(request=lambda message: SimpleNamespace(message=wire.Meet(places.pop(0))))


def test_a_machine_waits_until_the_first_has_said_where_it_is():
    assert asked(answering(["", "host:1"]), 60.0) == "host:1"


def test_a_machine_does_not_wait_for_ever_for_the_first():
    with pytest.raises(TimeoutError, match="machine 0 of the learner has not come in 0 s; start it"):
        asked(answering([""]), 0.0)
