"""Joining and leaving the learner's process group, under April's launcher or torchrun."""

import os
import sys
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from april.config import LearnerSection
from april.learner.launch import RESTARTS, STORE_FILE
from april.wire.sockets.base import interface_towards

Value = TypeVar("Value")

LONG_WAIT = timedelta(days=7)
"""Timeout of the process groups in which ranks wait for rank 0's next batch. Generation may take hours; if rank 0 dies,
the launcher kills the other ranks."""


def join(section: LearnerSection) -> torch.device:
    """Join the default group (gloo on a CPU; NCCL or RCCL and gloo on accelerators); returns this rank's device.

    On one machine gloo listens on the loopback interface only; on several it uses the interface towards the first.
    """
    torch.set_num_threads(section.threads)
    kind = section.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if interface := gloo_interface():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=section.collective_timeout_s)
    rendezvous_options = rendezvous_of_this_start(timeout)
    if kind == "cpu":
        dist.init_process_group("gloo", timeout=timeout, **rendezvous_options)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo", timeout=timeout, **rendezvous_options)
    return device


def is_on_one_machine() -> bool:
    """Whether all ranks are on this machine, by the launcher's environment variables."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def gloo_interface() -> str:
    """Network interface for gloo between ranks; empty to let gloo choose."""
    if is_on_one_machine():
        return "lo" if sys.platform == "linux" else ""
    interface = interface_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if interface != "lo":
        return interface
    return ""  # on the first machine: gloo uses the interface that its host name resolves to


def rendezvous_of_this_start(timeout: timedelta) -> dict[str, Any]:
    """Store, rank and world size for `init_process_group`: the file of April's launcher, or the store of several
    machines or of torchrun. Such a store lives on, with the addresses of dead ranks, when the ranks are restarted, so
    each start uses key names of its own."""
    if path := os.environ.get(STORE_FILE):
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        file_store = dist.FileStore(path, world_size)
        file_store.set_timeout(timeout)
        return {"store": file_store, "rank": rank, "world_size": world_size}
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    start = os.environ.get(RESTARTS, "0")
    return {"store": dist.PrefixStore(f"start_{start}", store), "rank": rank, "world_size": world_size}


def long_wait_group() -> dist.ProcessGroup:
    """New gloo group over all ranks whose timeout is days, for waits for rank 0. Collective."""
    return dist.new_group(backend="gloo", timeout=LONG_WAIT)


def all_gather_values(own: Value, form: Any, group: dist.ProcessGroup | None = None) -> list[Value]:
    """The value `own` of each rank of a gloo group, by rank. Values travel as MessagePack and must be of the type
    `form`; a rank's bytes that are not raise msgspec.DecodeError, and nothing in them is executed. Collective."""
    encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(own)), dtype=torch.uint8)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(encoded)]), group)
    padded = encoded.new_zeros(int(max(sizes)))
    padded[: len(encoded)] = encoded
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group)
    decode = msgspec.msgpack.Decoder(form).decode
    return [decode(memoryview(each[:size].numpy())) for each, size in zip(received, sizes, strict=True)]


def leave() -> None:
    dist.destroy_process_group()
