"""Rule for the number of requests to keep on a server, from the load that the server reports.

A pure state machine: observations in, a number of requests out. If requests queue while memory is full, the number
shrinks to those that run. Once none queues and memory has room, it grows again, up to the server's own maximum.
"""

FULL = 0.9
"""Share of the KV cache in use above which the number does not grow."""
GROWTH = 1.25
"""Factor by which the number grows with each observation of a server with room."""


class CapacityRule:
    OBSERVED = ("num_running_reqs", "num_waiting_reqs", "token_usage", "max_running_requests")

    def __init__(self, slots: int):
        self.slots = slots
        self.requests = slots
        self.waiting = 0
        """Queued requests of the last observation."""

    def observe(
        self, num_running_reqs: int, num_waiting_reqs: int, token_usage: float, max_running_requests: int
    ) -> None:
        """`token_usage`: share of the KV cache in use. `max_running_requests`: the server's maximum, 0 if unknown."""
        self.waiting = num_waiting_reqs
        most = min(self.slots, max_running_requests or self.slots)
        if num_waiting_reqs and num_running_reqs < most and token_usage >= FULL:
            self.requests = max(1, num_running_reqs)
        elif not num_waiting_reqs and token_usage < FULL:
            self.requests = max(self.requests + 1, int(self.requests * GROWTH))
        self.requests = min(self.requests, most)
