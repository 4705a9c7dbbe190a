"""A worker's connection that delivers scripted messages, and an engine that generates nothing."""

from types import SimpleNamespace

import numpy as np

from april import wire
from april.wire.message import Version


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


class Engine:
    """Fake engine that generates nothing."""

    version, live, queued, capacity, generated_tokens = Version(0, 0), 0, 0, 8, 0

    def step(self):
        return []

    def failures(self):
        return []

    def submit(self, request):
        self.live += 1

    def cancel(self, request_id):
        return []

    def cancel_all(self, request_ids):
        return []


def grant(lease, evaluation=False):
    task = wire.Task(0, evaluation, label="", reward="exact", temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    grant = wire.Grant(
        lease, task_index=0, index=lease, scoring=False, max_new_tokens=9, seed=lease, finish_reason="",
        hand_over=False, group_scored=[], turns=0, turn_start=0, state=b"", stop_token_ids=[],
    )  # fmt: skip
    return wire.Grants([task], [grant])
