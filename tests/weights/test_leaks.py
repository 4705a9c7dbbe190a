"""What is closed leaves nothing open in its process."""

import gc
import os
import threading
import weakref

import pytest
import torch

from april.config import WeightsSection
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.wire.message import Version
from tests.support.run_processes import wait_until

PATIENCE_S = 60.0


@pytest.mark.full
def test_publishers_and_receivers_leave_no_descriptor_open():
    def open_and_close():
        publisher = WeightPublisher(WeightsSection(), "test", "cpu")
        receiver = WeightReceiver(WeightsSection(), "uid", "name", "cpu")
        receiver.connect(publisher.address)
        receiver.close(PATIENCE_S)
        publisher.close(PATIENCE_S)
        del receiver, publisher
        gc.collect()

    open_and_close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        open_and_close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_withdrawn_version_is_freed_although_its_workers_wait_for_the_next(monkeypatch):
    publisher = WeightPublisher(WeightsSection(), "test", "cpu")
    wait = publisher._changed.wait
    monkeypatch.setattr(publisher._changed, "wait", lambda timeout=None: wait(10 * PATIENCE_S))
    receiver = WeightReceiver(WeightsSection(), "uid", "name", "cpu")
    receiver.connect(publisher.address)
    wait_until(lambda: any(each.state == "ready" for each in list(publisher._channels.values())))
    publishing = threading.Thread(target=publisher.publish, args=(Version(0, 0), {"weight": torch.ones(8)}))
    publishing.start()
    wait_until(lambda: (staged := receiver.take()) and (receiver.loaded(staged.version) or True))
    publishing.join(PATIENCE_S)
    published = weakref.ref(publisher._snapshot)
    publisher.withdraw()
    wait_until(lambda: published() is None)
    receiver.close()
    publisher.close()
