"""Bytes/s of weights from a learner to an engine in another process on the same card.

April's lane goes over gloo, from the CPU's memory into the engine's. Beside it: CUDA IPC, by which a process copies
straight out of another one's memory and which April has no lane for, and a copy within one process, the limit of both.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.multiprocessing as mp
from part import Part, make_model

REPEATS = 5
PATIENCE_S = 60.0
CONTEXT = 64
"""Context of the engine, which generates nothing, tokens."""


def main() -> None:
    part = Part.from_command_line(__doc__.partition("\n")[0])
    shape = "tiny" if part.tiny else "0.6B"
    in_memory = Path("/dev/shm")
    temporary = tempfile.TemporaryDirectory(prefix="april-gpu-", dir=in_memory if in_memory.is_dir() else None)
    with temporary as made, part.attempt("all"):
        folder = make_model(Path(made) / "model", shape, torch.bfloat16, CONTEXT, part.device.type)
        state = read_state(folder)
        size = sum(tensor.nbytes for tensor in state.values())
        part.row("weights_gb", size / 1e9, "GB")
        with lane(part, folder) as publish:  # its engine loads while the others are measured
            with part.attempt("device copy"):
                device_copy(part, size)
            with part.attempt("CUDA IPC"):
                if part.enough_time("CUDA IPC"):
                    between_processes(part, size)
            with part.attempt("lane over gloo"):
                publish(state)
    part.fact("April's lane by CUDA IPC", "not built")


def read_state(folder: Path) -> dict[str, torch.Tensor]:
    """The weights on the CPU, as the learner collects them before they are published."""
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors")
    return {name: tensor.clone() for name, tensor in state.items()}


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
    part.row("gpu_copy_gb_per_s", speeds[1:], "GB/s")


# --- memory of another process ----------------------------------------------------------------------------------------


def between_processes(part: Part, size: int) -> None:
    """Seconds from the message with the handle of a buffer until the other process says that it has copied it all.
    Each time another buffer is sent, and its handle opened."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    handles = context.Queue()
    child = context.Process(target=take_copies, args=(handles, theirs, part.device.type, size), daemon=True)
    child.start()
    try:
        wait(ours, child, part)
        speeds, kept = [], []
        for turn in range(3):
            buffer = torch.full((size,), turn + 1, dtype=torch.uint8, device=part.device)
            kept.append(buffer)  # until the child has let it go
            synchronize(part.device)
            began = time.perf_counter()
            handles.put(buffer)
            answer = wait(ours, child, part)
            speeds.append(size / 1e9 / (time.perf_counter() - began))
            assert answer == turn + 1, answer
        part.row("gpu_ipc_gb_per_s", speeds[1:], "GB/s")
    finally:
        child.terminate()
        child.join()


def take_copies(handles: "mp.Queue", answers: Connection, device: str, size: int) -> None:
    """Copy each buffer whose handle arrives; answer its last byte."""
    mine = torch.zeros(size, dtype=torch.uint8, device=device)
    answers.send(0)
    while True:
        theirs = handles.get()
        mine.copy_(theirs)
        synchronize(mine.device)
        del theirs
        answers.send(int(mine[-1]))


def wait(answers: Connection, child: "mp.process.BaseProcess", part: Part) -> int:
    deadline = time.monotonic() + (PATIENCE_S if part.tiny else min(PATIENCE_S, max(1.0, part.left_s)))
    while not answers.poll(0.0005):
        if not child.is_alive() or time.monotonic() > deadline:
            raise RuntimeError(f"no answer of the other process, whose exit code is {child.exitcode}")
    return answers.recv()


# --- April's lane -----------------------------------------------------------------------------------------------------


@contextmanager
def lane(part: Part, folder: Path) -> Iterator[Callable[[dict[str, torch.Tensor]], None]]:
    """Starts an engine's process; yields a function that publishes weights to it and records the speed."""
    from april.config import WeightsSection
    from april.weights.publisher import WeightPublisher
    from april.wire.message import Version

    section = WeightsSection(backend="gloo", publish_deadline_s=PATIENCE_S, transfer_deadline_s=PATIENCE_S)
    publisher = WeightPublisher(section, "gpu", part.device.type)
    child = mp.get_context("spawn").Process(
        target=engine_process, args=(publisher.address, folder, part.device.type, section), daemon=True
    )
    child.start()

    def publish(state: dict[str, torch.Tensor]) -> None:
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

    try:
        yield publish
    finally:
        child.terminate()
        child.join()
        publisher.close()


def engine_process(address: str, folder: Path, device: str, section) -> None:
    """A worker's receiver and engine, which generates nothing."""
    from april.weights.receiver import WeightReceiver
    from april.workers.engines.embedded.engine import TorchEngine

    engine = TorchEngine(folder, slots=1, max_context=CONTEXT, device=device)
    receiver = WeightReceiver(section, uid="gpu", name="gpu", device=device)
    receiver.connect(address)
    while True:
        if staged := receiver.take():
            engine.load_weights(staged.version, staged.tensors)
            synchronize(engine.device)
            receiver.loaded(staged.version)
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
