"""How many requests a server takes at once, from what it says of itself.

A pure rule: observations in, a number out, never more than the server says it runs. Requests that wait though fewer run
mean that its memory is full: as many as run are taken then. Once none waits and memory has room, the number grows.
"""

FULL = 0.9
"""share of the KV memory in use from which on no further requests are asked for"""
GROWTH = 1.25


class CapacityRule:
    OBSERVED = ("num_running_reqs", "num_waiting_reqs", "token_usage", "max_running_requests")

    def __init__(self, slots: int):
        self.slots = slots
        self.requests = slots
        self.waiting = 0
        """requests, as the server has said last"""

    def observe(
        self, num_running_reqs: int, num_waiting_reqs: int, token_usage: float, max_running_requests: int
    ) -> None:
        """`token_usage`: share of the KV memory in use; `max_running_requests`: of the server's own, 0 if not known."""
        self.waiting = num_waiting_reqs
        most = min(self.slots, max_running_requests or self.slots)
        if num_waiting_reqs and num_running_reqs < most and token_usage >= FULL:
            self.requests = max(1, num_running_reqs)
        elif not num_waiting_reqs and token_usage < FULL:
            self.requests = max(self.requests + 1, int(self.requests * GROWTH))
        self.requests = min(self.requests, most)
