"""A lane: a process group of learner rank 0 and one worker, or the ranks of its inference server, outside the learner's
own group.

A dead or hung peer costs its own lane and nobody else. Groups are built from objects, since the public
constructors only make subgroups of the default one.
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
"""ranks in a lane; those of an inference server begin at the worker's"""
IN_FLIGHT = 2
"""buckets; as many as gloo has threads for"""


def join(
    name: str, store: dist.TCPStore, rank: int, backend: str, timeout_s: float, server_ranks: int = 0
) -> "dist.Backend":
    """Meet the other side of the lane under `name`. Raises RuntimeError or OSError if it does not come in time.

    gloo listens at this machine's address on the way to the store and nowhere else. `server_ranks`: the other side is
    a server, which scopes its keys as torch's own groups do. The worst case on gloo is five times `timeout_s`: call it
    from a thread that nobody waits for.
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
    """Broadcast the buckets from the learner to the worker, all of them by `deadline`, Unix time. In place on the
    worker's side. Raises RuntimeError or TimeoutError.

    The next one is on its way before the last has arrived: gloo asks the other side whether it is ready for each, and
    over a long way a question takes longer than a bucket.
    """
    options = dist.BroadcastOptions()
    options.rootRank = LEARNER
    under_way: deque[tuple[dist.Work, Tensor, Tensor]] = deque()

    def arrive() -> None:
        work, on_device, bucket = under_way.popleft()
        work.wait(left(deadline))
        if on_device is not bucket:
            torch.cuda.synchronize()
            bucket.copy_(on_device)

    for bucket in buckets:
        if len(under_way) == IN_FLIGHT:
            arrive()
        on_device = bucket.cuda() if backend == "nccl" else bucket
        options.timeout = left(deadline)
        under_way.append((group.broadcast([on_device], options), on_device, bucket))
    while under_way:
        arrive()


def left(deadline: float) -> timedelta:
    """Raises TimeoutError where nothing is."""
    found = timedelta(milliseconds=int(1000 * (deadline - clock.now())))
    if found <= timedelta(0):
        raise TimeoutError("the weights were not all through within weights.transfer_deadline_s")
    return found
