"""The process group of a weight channel: learner rank 0 and one worker, or the ranks of its inference server.

A dead or hung peer breaks only its own channel. The groups are constructed directly, since torch's public functions
only make subgroups of the default group.
"""

from collections import deque
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from april.connections.route import own_address
from april.processes import clock

LEARNER, WORKER = 0, 1
"""Ranks in a channel. The ranks of an inference server start at `WORKER`."""
IN_FLIGHT = 2
"""Most buckets on their way at a time: as many as gloo has threads for."""


def join(
    name: str, store: dist.TCPStore, rank: int, backend: str, timeout_s: float, server_ranks: int = 0
) -> "dist.Backend":
    """Build the process group of channel `name`. Raises RuntimeError or OSError if the other side does not join.

    gloo listens only at this machine's address on the route to the store. `server_ranks`: if above 0, the other side is
    a server with that many ranks, which prefixes its keys as torch's own groups do. gloo may block for five times
    `timeout_s`, so call this from a thread that nobody waits for.
    """
    timeout = timedelta(seconds=timeout_s)
    device = "cuda" if backend == "nccl" else "cpu"
    if server_ranks:
        scoped = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    else:
        scoped = dist.PrefixStore(f"{name}/{device}/", store)
    size = 1 + (server_ranks or 1)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(scoped, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(store.host, store.port))]
    return dist.ProcessGroupGloo(scoped, rank, size, options)


def transfer(group: "dist.Backend", buckets: Iterable[Tensor], backend: str, deadline: float) -> None:
    """Broadcast uint8 buckets from the learner to the worker, in place on the worker's side, by `deadline` (Unix time).

    Raises RuntimeError or TimeoutError. Several broadcasts overlap: gloo does a round trip for each, which takes longer
    than a bucket on a slow route.
    """
    options = dist.BroadcastOptions()
    options.rootRank = LEARNER
    pending: deque[tuple[dist.Work, Tensor, Tensor]] = deque()

    def finish_oldest() -> None:
        work, on_device, bucket = pending.popleft()
        work.wait(remaining_time(deadline))
        if on_device is not bucket:
            torch.cuda.synchronize()
            bucket.copy_(on_device)

    for bucket in buckets:
        if len(pending) == IN_FLIGHT:
            finish_oldest()
        on_device = bucket.cuda() if backend == "nccl" else bucket
        options.timeout = remaining_time(deadline)
        pending.append((group.broadcast([on_device], options), on_device, bucket))
    while pending:
        finish_oldest()


def remaining_time(deadline: float) -> timedelta:
    """The time until `deadline` (Unix time). Raises TimeoutError if it has passed."""
    remaining = timedelta(milliseconds=int(1000 * (deadline - clock.now())))
    if remaining <= timedelta(0):
        raise TimeoutError("the weights were not transferred within weights.transfer_deadline_s; raise it")
    return remaining
