"""The two sides of the lanes of `weight_lane.py`: what measures, and the processes that take weights."""

import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.multiprocessing  # from here on a Pipe sends handles of tensors
from part import Part, make_model

from april.config import WeightsSection
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.wire.message import Version
from april.workers.engines.embedded.engine import TorchEngine

REPEATS = 5
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
        section = WeightsSection(backend="gloo", publish_deadline_s=PATIENCE_S, transfer_deadline_s=PATIENCE_S)
        publisher = WeightPublisher(section, "gpu", part.device.type)
        engine[0].send((publisher.address, folder, part.device.type, section))
        state = read_state(folder)
        size = sum(tensor.nbytes for tensor in state.values())
        part.row("weights_gb", size / 1e9, "GB")
        with part.attempt("device copy"):
            device_copy(part, size)
        with part.attempt("lane over gloo"):
            publish(part, publisher, state, engine[1])
        with part.attempt("CUDA IPC"):
            between_processes(part, size, *copies)
        publisher.close()
    part.fact("April's lane by CUDA IPC", "not built")


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


# --- April's lane -----------------------------------------------------------------------------------------------------


def publish(part: Part, publisher: WeightPublisher, state: dict[str, torch.Tensor], child: BaseProcess) -> None:
    """Publish weights to the engine of another process, until each version is loaded."""
    began = time.monotonic()
    while not publisher.publish(Version(0, 0), state)["publish_workers"]:
        if not child.is_alive() or time.monotonic() - began > PATIENCE_S or (part.left_s < 1 and not part.tiny):
            raise RuntimeError(f"no engine has come, the exit code of its process is {child.exitcode}")
        time.sleep(0.1)
    part.fact("seconds until the engine has its first weights", round(time.monotonic() - began, 2))
    seconds, figures = [], {}
    for turn in range(1, REPEATS + 1):
        if seconds and not part.enough_time("another publication", 1 + 2 * seconds[-1]):
            break
        began = time.perf_counter()
        figures = publisher.publish(Version(0, turn), state)
        seconds.append(time.perf_counter() - began)
        assert figures["publish_workers"] == 1, figures
    part.row("gpu_weight_lane_s", seconds, "s")
    part.row("gpu_weight_lane_gb_per_s", [figures["publish_bytes"] / 1e9 / each for each in seconds], "GB/s")
    part.fact("figures of the last publication", {name: round(value, 4) for name, value in figures.items()})


def take_weights(connection: Connection) -> None:
    """A worker's receiver and engine, which generates nothing."""
    address, folder, device, section = connection.recv()
    engine = TorchEngine(folder, slots=1, max_context=CONTEXT, device=device)
    receiver = WeightReceiver(section, uid="gpu", name="gpu", device=device)
    receiver.connect(address)
    while True:
        if staged := receiver.take():
            engine.load_weights(staged.version, staged.tensors)
            synchronize(engine.device)
            receiver.loaded(staged.version)
        time.sleep(0.0005)
