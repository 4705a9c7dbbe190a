"""The two sides of the lanes of `weight_lane.py`: what measures, and the processes that take weights."""

import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.multiprocessing  # from here on a Pipe sends handles of tensors
from part import Part, make_model

from april.config import WeightsSection
from april.learner.model import on_cpu
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.weights.snapshot import digest, pack
from april.wire.message import Version
from april.workers.engines.embedded.engine import TorchEngine

REPEATS = 4
PATIENCE_S = 60.0
CONTEXT = 64
"""Context of the engine, which generates nothing, tokens."""

Other = tuple[Connection, BaseProcess]
"""Another process, and the connection to it."""


def measure(description: str, copies: Other, engine: Other) -> None:
    part = Part.from_command_line(description)
    shape = "tiny" if part.tiny else "0.6B"
    in_memory = Path("/dev/shm")
    temporary = tempfile.TemporaryDirectory(prefix="april-gpu-", dir=in_memory if in_memory.is_dir() else None)
    with temporary as made, part.attempt("all"):
        folder = make_model(Path(made) / "model", shape, torch.bfloat16, CONTEXT, part.device.type)
        engine[0].send((folder, part.device.type))
        state = read_state(folder)
        size = sum(tensor.nbytes for tensor in state.values())
        part.row("weights_gb", size / 1e9, "GB")
        shared, gloo = [], []
        with part.attempt("lane through shared memory"):
            shared = publish(part, "shared_memory", "gpu_weight_lane_shared", state, *engine)
        with part.attempt("between card and host"):
            host_copies(part, state, size)
        with part.attempt("CUDA IPC"):
            between_processes(part, size, *copies)
        with part.attempt("device copy"):
            device_copy(part, size)
        with part.attempt("lane over gloo"):
            gloo = publish(part, "collective", "gpu_weight_lane", state, *engine)
        if shared and gloo:
            part.row("gpu_weight_lane_shared_vs_gloo", min(gloo) / min(shared), "ratio")
        if part.device.type == "cuda":
            with part.attempt("lane by CUDA IPC"):
                ipc = publish(part, "cuda_ipc", "gpu_weight_lane_ipc", state, *engine)
                if shared:
                    part.row("gpu_weight_lane_ipc_vs_shared", min(shared) / min(ipc), "ratio")


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    """The weights on the CPU, as the learner collects them before they are published."""
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- a copy within the process ----------------------------------------------------------------------------------------


def device_copy(part: Part, size: int) -> None:
    """Copied bytes a second; the card reads as many as it writes."""
    source, target = torch.randint(0, 255, (2, size), dtype=torch.uint8, device=part.device)
    speeds = []
    for _ in range(REPEATS + 1):
        synchronize(part.device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(part.device)
        speeds.append(size / 1e9 / (time.perf_counter() - began))
    part.row("gpu_device_copy_gb_per_s", speeds[1:], "GB/s")


# --- memory of another process ----------------------------------------------------------------------------------------


def between_processes(part: Part, size: int, connection: Connection, child: BaseProcess) -> None:
    """Seconds from the message with the handle of a buffer until the other process says that it has copied it all.
    Each time another buffer is sent, and its handle opened."""
    connection.send((part.device.type, size))
    wait(connection, child, part)
    speeds, kept = [], []
    for turn in range(4):
        buffer = torch.full((size,), turn + 1, dtype=torch.uint8, device=part.device)
        kept.append(buffer)  # until the other process has let it go
        synchronize(part.device)
        began = time.perf_counter()
        connection.send(buffer)
        answer = wait(connection, child, part)
        speeds.append(size / 1e9 / (time.perf_counter() - began))
        assert answer == turn + 1, answer
    part.row("gpu_ipc_gb_per_s", speeds[1:], "GB/s")


def take_copies(connection: Connection) -> None:
    """Copy each buffer whose handle arrives; answer its last byte."""
    device, size = connection.recv()
    mine = torch.zeros(size, dtype=torch.uint8, device=device)
    connection.send(0)
    while True:
        theirs = connection.recv()
        mine.copy_(theirs)
        synchronize(mine.device)
        del theirs
        connection.send(int(mine[-1]))


def wait(connection: Connection, child: BaseProcess, part: Part) -> int:
    deadline = time.monotonic() + (PATIENCE_S if part.tiny else min(PATIENCE_S, max(1.0, part.left_s)))
    while not connection.poll(0.0005):
        if not child.is_alive() or time.monotonic() > deadline:
            raise RuntimeError(f"no answer of the other process, whose exit code is {child.exitcode}")
    return connection.recv()


# --- between the card and the host ------------------------------------------------------------------------------------


def host_copies(part: Part, state: dict[str, torch.Tensor], size: int) -> None:
    """Copied bytes a second of all weights, tensor by tensor: to the host as the learner collects them, and as a plain
    copy to new memory; from the host, page-locked or not, as an engine loads them. What the learner and a worker do
    with them on the host: packing with digest, and the digest alone."""
    weights = [tensor.to(part.device) for tensor in state.values()]
    pageable, pinned = list(state.values()), [on_cpu(tensor) for tensor in weights]
    synchronize(part.device)
    kept = pinned if part.device.type == "cuda" else pageable

    def collect() -> None:
        nonlocal pinned
        pinned = []  # free for the next, as the learner's are once they are packed
        pinned = [on_cpu(tensor) for tensor in weights]

    def to_pageable() -> None:
        for tensor in weights:
            tensor.to("cpu", copy=True)

    def load(host: list[torch.Tensor]) -> None:
        for tensor, held in zip(weights, host, strict=True):
            tensor.copy_(held, non_blocking=True)

    snapshot = pack(Version(0, 0), state)
    for name, work in (
        ("gpu_weights_to_cpu_pinned_gb_per_s", collect),
        ("gpu_weights_to_cpu_pageable_gb_per_s", to_pageable),
        ("gpu_weights_from_cpu_pageable_gb_per_s", partial(load, pageable)),
        ("gpu_weights_from_cpu_pinned_gb_per_s", partial(load, kept)),
        ("weights_pack_gb_per_s", lambda: pack(Version(0, 0), state)),
        ("weights_digest_gb_per_s", lambda: digest(snapshot.data)),
    ):
        seconds = []
        for _ in range(3):
            if not part.enough_time(name, 2.0):
                return
            began = time.perf_counter()
            work()
            synchronize(part.device)
            seconds.append(time.perf_counter() - began)
        part.row(name, [size / 1e9 / each for each in seconds[1:]], "GB/s")


# --- April's lanes ----------------------------------------------------------------------------------------------------


def publish(
    part: Part, transport: str, name: str, state: dict[str, torch.Tensor], connection: Connection, child: BaseProcess
) -> list[float]:
    """Publish weights to the engine of another process, each version until it is loaded; returns the seconds of each:
    packing, transfer, both digests, loading."""
    section = WeightsSection(
        transport=transport, backend="gloo", publish_deadline_s=PATIENCE_S, transfer_deadline_s=PATIENCE_S
    )
    publisher = WeightPublisher(section, "gpu", part.device.type)
    connection.send((publisher.address, section))
    began = time.monotonic()
    while not publisher.publish(Version(0, 0), state)["publish_workers"]:
        if not child.is_alive() or time.monotonic() - began > PATIENCE_S or (part.left_s < 1 and not part.tiny):
            raise RuntimeError(f"no engine has come, the exit code of its process is {child.exitcode}")
        time.sleep(0.1)
    part.fact(f"{transport}: seconds until the engine has its first weights", round(time.monotonic() - began, 2))
    seconds, figures = [], {}
    for turn in range(1, REPEATS + 1):
        if seconds and not part.enough_time("another publication", 1 + 2 * seconds[-1]):
            break
        began = time.perf_counter()
        figures = publisher.publish(Version(0, turn), state)
        seconds.append(time.perf_counter() - began)
        assert figures["publish_workers"] == 1, figures
    part.row(f"{name}_gb_per_s", [figures["publish_bytes"] / 1e9 / each for each in seconds], "GB/s")
    part.row(f"{name}_s", seconds, "s")
    loading = []
    while connection.poll():
        loading.append(connection.recv())
    part.row(f"{name}_load_s", loading[1:], "s")
    part.fact(f"{transport}: figures of the last publication", {key: round(each, 4) for key, each in figures.items()})
    publisher.close()
    return seconds


def take_weights(connection: Connection) -> None:
    """A worker's engine, which generates nothing, with one receiver after the other: a learner's address and section
    `[weights]` for each. Answers the seconds of each loading."""
    folder, device = connection.recv()
    engine = TorchEngine(folder, slots=1, max_context=CONTEXT, device=device)
    while True:
        address, section = connection.recv()
        receiver = WeightReceiver(section, uid="gpu", name="gpu", device=device)
        receiver.connect(address)
        while not connection.poll():
            if staged := receiver.take():
                began = time.perf_counter()
                engine.load_weights(staged.version, staged.tensors)
                synchronize(engine.device)
                connection.send(time.perf_counter() - began)
                receiver.loaded(staged.version)
            time.sleep(0.0005)
        receiver.close()
