"""What is closed leaves nothing open in its process."""

import gc
import os

import pytest

from april.config import WeightsSection
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver

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
