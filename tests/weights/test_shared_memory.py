"""A channel through shared memory carries buckets of any size between two processes of one user, and leaves nothing
behind."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from april.config import WeightsSection
from april.util import clock
from april.weights import channel
from april.weights.channel import ChannelInvite
from april.weights.transports import SLOT_BYTES, SLOTS, OtherMachine, SharedMemoryTransport, user_of

PATIENCE_S = 60.0


@pytest.fixture
def meet():
    """meet(name) -> (the learner's link, the worker's) of a channel through shared memory."""
    store, links = channel.serve_store("127.0.0.1"), []
    transport = SharedMemoryTransport(WeightsSection(transport="shared_memory"))

    def meet(name, timeout_s=PATIENCE_S):
        invite = ChannelInvite(name, "gloo", "127.0.0.1", store.port, timeout_s)
        with ThreadPoolExecutor(2) as sides:
            met = [sides.submit(transport.meet, invite, as_learner) for as_learner in (True, False)]
        links.extend(side.result() for side in met)
        return links[-2:]

    meet.store, meet.transport = store, transport
    yield meet
    for link in links:
        link.close()


def test_buckets_of_any_size_go_through_the_slots_in_order_transfer_after_transfer(meet):
    learner, worker = meet("any-size")
    for size in (0, 1, SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOTS * SLOT_BYTES + 17):
        sent = torch.randint(0, 255, (size,), dtype=torch.uint8)
        got = torch.zeros_like(sent)
        with ThreadPoolExecutor(1) as other:
            sending = other.submit(learner.send, sent.split(3 * SLOT_BYTES // 2), clock.now() + PATIENCE_S)
            worker.receive(got.split(3 * SLOT_BYTES // 2), clock.now() + PATIENCE_S)
            sending.result()
        assert torch.equal(sent, got)


def test_shared_memory_has_no_name_that_a_kill_could_leave_behind(meet):
    def names():
        return {name for folder in ("/dev/shm", tempfile.gettempdir()) for name in os.listdir(folder)}

    before = names()
    meet("nameless")
    assert [name for name in names() - before if name.startswith(("april-weights", "nameless"))] == []
    [mapped] = {
        line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "april-weights" in line
    }
    assert mapped == "/memfd:april-weights"


def test_a_side_that_waits_for_the_other_waits_until_the_deadline_or_its_end(meet):
    learner, worker = meet("waiting")
    with pytest.raises(TimeoutError, match=r"weights\.transfer_deadline_s"):
        worker.receive([torch.zeros(1, dtype=torch.uint8)], clock.now() + 0.2)
    learner, worker = meet("left")
    learner.close()
    with pytest.raises(ConnectionError, match="is gone"):
        worker.receive([torch.zeros(1, dtype=torch.uint8)], clock.now() + PATIENCE_S)


def test_a_worker_of_another_machine_is_refused_with_the_key_and_what_to_set(meet):
    meet.store.set("elsewhere/socket", "\0april-socket-of-another-machine")
    invite = ChannelInvite("elsewhere", "gloo", "127.0.0.1", meet.store.port, PATIENCE_S)
    with pytest.raises(OtherMachine, match=r"weights\.transport = 'shared_memory' .*workers.*'collective'"):
        meet.transport.meet(invite, as_learner=False)


def test_another_user_gets_no_memory_and_gives_none(meet, monkeypatch):
    monkeypatch.setattr("april.weights.transports.user_of", lambda peer: user_of(peer) + 1)
    with pytest.raises(OtherMachine, match=r"no worker .*weights\.join_deadline_s"):
        meet("another", timeout_s=1.0)
