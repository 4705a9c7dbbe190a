"""The machines of a learner find each other through the broker, or fail with a clear error."""

from types import SimpleNamespace

import pytest

from april import wire
from april.learner.multi_node import ask_address


def answering(places):
    return SimpleNamespace(request=lambda message: SimpleNamespace(message=wire.Rendezvous(places.pop(0))))


def test_a_machine_polls_until_the_first_has_announced_its_address():
    assert ask_address(answering(["", "host:1"]), 60.0) == "host:1"


def test_a_machine_does_not_wait_for_ever_for_the_first():
    with pytest.raises(TimeoutError, match="machine 0 of the learner has not come in 0 s; start it"):
        ask_address(answering([""]), 0.0)
