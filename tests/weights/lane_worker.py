"""A worker's weights thread in a process of its own: prints every version it loads with a sum over its tensors."""

import sys
import time

from april.config import WeightsSection
from april.weights.receiver import WeightReceiver

address, name = sys.argv[1:3]
receiver = WeightReceiver(WeightsSection(), uid=f"{name}-{time.monotonic_ns()}", name=name, device="cpu")
receiver.connect(address)
print("started", flush=True)
while True:
    if staged := receiver.take():
        total = sum(float(tensor.double().sum()) for tensor in staged.tensors.values())
        receiver.loaded(staged.version)
        print(f"{staged.version} {total:.6f}", flush=True)
    time.sleep(0.005)
