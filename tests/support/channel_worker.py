"""A worker's weights thread in a process of its own: prints every version it loads with a sum over its tensors.

Its arguments: the publisher's address, the transport, its name, and the folder of its model, if it has one; `--delta`:
deltas are sent to it.
"""

import sys
import time
from pathlib import Path

from april.config import WeightsSection
from april.weights.base import BaseWeights
from april.weights.receiver import WeightReceiver

address, transport, name, *model = [each for each in sys.argv[1:] if each != "--delta"]
section = WeightsSection(transport=transport, delta="auto" if "--delta" in sys.argv else "off")
base = BaseWeights(Path(model[0])) if model else None
receiver = WeightReceiver(section, uid=f"{name}-{time.monotonic_ns()}", name=name, device="cpu", base=base)
receiver.connect(address)
print("started", flush=True)
while True:
    if staged := receiver.take():
        total = sum(float(tensor.double().sum()) for tensor in staged.tensors.values())
        receiver.loaded(staged.version)
        print(f"{staged.version} {total:.6f}", flush=True)
    time.sleep(0.005)
