"""A worker's connection that delivers scripted messages."""

from types import SimpleNamespace

import numpy as np

from april import wire


class Connection:
    """Fake connection: delivers scripted messages, then stops the worker; records what it sends."""

    is_silent = False

    def __init__(self, script):
        self.script = [*script, wire.Stop("the script is over")]
        self.sent = []

    def hello(self, lease_ids, acknowledged_tokens=0):
        kept = {"lost_lease_ids": [], "weights_address": "", "weights_key": "", "weight_folders": []}
        return SimpleNamespace(renew_s=1.0, watermark=0, **kept)

    def receive(self, timeout_ms):
        message = self.script.pop(0)
        nothing = [np.arange(3, dtype="i4"), np.empty(0, "i4")]
        prompt = nothing if isinstance(message, wire.Grants) else []
        return [SimpleNamespace(message=message, arrays=prompt, session=0)]

    def send(self, message, arrays=()):
        self.sent.append(message)

    def hold(self, leases, emitted_tokens=0):
        pass

    def occupy(self, slots):
        pass

    def goodbye(self):
        self.sent.append(wire.Goodbye())

    def check_alive(self):
        pass
