"""How many requests a server takes at once, from what it says of itself.

A pure rule: observations in, a number out. Requests that wait though fewer than the server's slots run mean that its
memory is full: as many as run are taken then. Once none waits and memory has room, the number grows again.
"""

FULL = 0.9
"""share of the KV memory in use from which on no further requests are asked for"""
GROWTH = 1.25


class CapacityRule:
    OBSERVED = ("num_running_reqs", "num_waiting_reqs", "token_usage")

    def __init__(self, slots: int):
        self.slots = slots
        self.requests = slots

    def observe(self, num_running_reqs: int, num_waiting_reqs: int, token_usage: float) -> None:
        """`token_usage`: share of the KV memory in use."""
        if num_waiting_reqs and num_running_reqs < self.slots and token_usage >= FULL:
            self.requests = max(1, num_running_reqs)
        elif not num_waiting_reqs and token_usage < FULL:
            self.requests = min(self.slots, max(self.requests + 1, int(self.requests * GROWTH)))
