"""Engine, learner and weight lanes on a GPU: a random model of Qwen3-0.6B's shape in bf16, long-tailed lengths.

Offline, with torch 2.11 or newer. Each round generates with the weights of the round before and trains what came out.
The weights then go to a second process, which loads them as a worker does: on a GPU of its own over NCCL, or, where
there is only one, on the same over gloo. A raw broadcast of as many bytes between two processes stands beside it.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # april, which need not be installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import torch
import torch.distributed as dist
from common import Row, parser, ratios, report
from engine import LONGEST_PROMPT, LONGEST_RESPONSE, Work, longtail_work
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

from april.config import Config, WeightsSection
from april.launch.devices import environment_of, visible_devices
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.trainer import Trainer
from april.weights import channel
from april.weights.publisher import WeightPublisher
from april.weights.receiver import WeightReceiver
from april.wire.message import Version
from april.workers.engines.base import Request
from april.workers.engines.embedded.engine import TorchEngine

GROUP = 8
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Scale:
    shape: dict[str, int]
    """Shape of the model, by the keys of config.json."""
    slots: int
    requests: int
    rounds: int
    """Measured rounds, behind one of warm-up."""
    microbatch_tokens: int


FULL = Scale(
    {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    slots=256, requests=1024, rounds=3, microbatch_tokens=16_384,
)  # fmt: skip
TINY = Scale(
    {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    },
    slots=16, requests=16, rounds=1, microbatch_tokens=4096,
)  # fmt: skip


@dataclass(frozen=True)
class Devices:
    """Where learner and worker are, and what connects them."""

    device: torch.device
    """Device of engine, learner and worker."""
    worker_sees: str
    """The worker's GPU in CUDA_VISIBLE_DEVICES; empty for the learner's."""
    backend: str
    """of the lane"""

    @property
    def raw_device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"


def make_model(folder: Path, shape: dict[str, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        dtype=dtype,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def generate(engine: TorchEngine, work: Work) -> list[TrainSample]:
    """Every response at its forced length, with a random reward."""
    for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        engine.submit(Request(i, prompt, int(length), seed=i))
    chunks = [[] for _ in work.prompts]
    while engine.live:
        for chunk in engine.step():
            chunks[chunk.id].append(chunk)
    rng = np.random.default_rng(len(chunks))
    return [
        TrainSample(
            np.concatenate([prompt, *(chunk.tokens for chunk in of_sample)]),
            len(prompt),
            np.concatenate([chunk.logprobs for chunk in of_sample]),
            float(rng.normal()),
            ((0, int(length), engine.version),),
        )
        for prompt, length, of_sample in zip(work.prompts, work.lengths, chunks, strict=True)
    ]


def generate_and_train(trainer: Trainer, engine: TorchEngine, scale: Scale, vocabulary: int) -> list[Row]:
    generated, trained, use, agreement = [], [], [], []
    for turn in range(scale.rounds + 1):
        engine.load_weights(Version(0, trainer.step_count), trainer.weights())
        work = longtail_work(vocabulary, scale.requests, seed=turn)
        started = time.perf_counter()
        samples = generate(engine, work)
        generated.append(work.tokens / (time.perf_counter() - started))
        groups = [samples[first : first + GROUP] for first in range(0, len(samples), GROUP)]
        batch, started = TrainingBatch(trainer.step_count, groups), time.perf_counter()
        metrics = trainer.step(batch)
        trained.append(work.tokens / (time.perf_counter() - started))
        use.append(metrics.get("mfu", metrics["tflop_per_s"]))
        agreement.append(metrics["k3"])
        assert not metrics["update_skipped"], metrics
        print(f"round {turn}: {generated[-1]:,.0f} generated/s, {trained[-1]:,.0f} trained/s", file=sys.stderr)
    name, unit = ("train_mfu", "fraction") if "mfu" in metrics else ("train_tflop_per_s", "TFLOP/s")
    return [
        Row("generated_tokens_per_s", generated[1:], "tokens/s"),
        Row("trained_tokens_per_s", trained[1:], "tokens/s"),
        Row(name, use[1:], unit),
        Row("engine_learner_k3", agreement[1:], "nats"),
    ]


# --- weights ------------------------------------------------------------------------------------------------------


def broadcasts(trainer: Trainer, folder: Path, devices: Devices, repeats: int) -> list[Row]:
    """Seconds to collect all weights, and to have them loaded by the worker over its lane; the same bytes sent raw."""
    section = WeightsSection(backend=devices.backend, publish_deadline_s=PATIENCE_S, transfer_deadline_s=PATIENCE_S)
    publisher = WeightPublisher(section, "gpu", devices.device.type)
    gathered, sent = [], []
    tensors, deadline = trainer.weights(), time.monotonic() + PATIENCE_S
    with process(devices, worker, publisher.address, folder, devices.device.type, section) as alive:
        while not publisher.publish(Version(0, 0), tensors)["publish_workers"]:
            if not alive() or time.monotonic() > deadline:
                sys.exit(f"no lane over {devices.backend} to the process that takes the weights; it has said why")
            time.sleep(0.1)
        for turn in range(1, repeats + 1):
            started = time.perf_counter()
            tensors = trainer.weights()
            gathered.append(time.perf_counter() - started)
            figures = publisher.publish(Version(0, turn), tensors)
            sent.append(time.perf_counter() - started - gathered[-1])
            assert figures["publish_workers"] == 1, figures
    publisher.close()
    size = int(figures["publish_bytes"])
    raw = raw_broadcast(devices, size, repeats)
    return [
        Row("weights_gb", [size / 1e9], "GB"),
        Row("weight_gather_s", gathered, "s"),
        Row("weight_broadcast_s", sent, "s"),
        Row("weight_broadcast_gb_per_s", [size / 1e9 / seconds for seconds in sent], "GB/s"),
        Row("raw_broadcast_gb_per_s", [size / 1e9 / seconds for seconds in raw], "GB/s"),
        Row("broadcast_vs_raw", ratios(raw, sent), "ratio"),
    ]


def worker(address: str, folder: Path, device: str, section: WeightsSection) -> None:
    """A worker's receiver and engine, which generates nothing."""
    engine = TorchEngine(folder, slots=1, max_context=16, device=device)
    receiver = WeightReceiver(section, uid="gpu", name="gpu", device=device)
    receiver.connect(address)
    while True:
        if staged := receiver.take():
            engine.load_weights(staged.version, staged.tensors)
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
            receiver.loaded(staged.version)
        time.sleep(0.0005)


def raw_broadcast(devices: Devices, size: int, repeats: int) -> list[float]:
    """Seconds for one buffer of `size` bytes, from where the learner has it to where the worker does, repeated."""
    rendezvous = channel.serve_store("127.0.0.1")
    with process(devices, raw_receiver, rendezvous.port, size, repeats, devices):
        return list(raw_turns(channel.LEARNER, rendezvous.port, size, repeats, devices))


def raw_receiver(port: int, size: int, repeats: int, devices: Devices) -> None:
    list(raw_turns(channel.WORKER, port, size, repeats, devices))


def raw_turns(rank: int, port: int, size: int, repeats: int, devices: Devices) -> Iterator[float]:
    client = channel.connect_to_store("127.0.0.1", port, PATIENCE_S)
    group = channel.join("raw", client, rank, devices.backend, PATIENCE_S)
    buffer, word = (torch.zeros(n, dtype=torch.uint8, device=devices.raw_device) for n in (size, 1))
    for turn in range(repeats + 1):
        send(group, word, channel.WORKER)  # it is there
        started = time.perf_counter()
        send(group, buffer, channel.LEARNER)
        send(group, word, channel.WORKER)  # it has it all
        if turn:
            yield time.perf_counter() - started


def send(group: "dist.Backend", buffer: torch.Tensor, root: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = root
    group.broadcast([buffer], options).wait()
    if buffer.is_cuda:
        torch.cuda.synchronize()


@contextmanager
def process(devices: Devices, target: Callable, *arguments) -> Iterator[Callable[[], bool]]:
    """Run `target` in a process of its own; yields a function that says whether it lives."""
    child = get_context("spawn").Process(
        target=run_with_gpu, args=(devices.worker_sees, target, *arguments), daemon=True
    )
    child.start()
    try:
        yield child.is_alive
    finally:
        child.terminate()
        child.join()


def run_with_gpu(gpu: str, target: Callable, *arguments) -> None:
    os.environ |= environment_of([gpu] if gpu else [])
    target(*arguments)


def devices_of(device: str) -> Devices:
    if device == "cpu" or torch.cuda.device_count() == 1:
        return Devices(torch.device(device), "", "gloo")
    return Devices(torch.device("cuda"), visible_devices()[1], "nccl")


def main() -> None:
    arguments = parser(__doc__.partition("\n")[0])
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = arguments.parse_args()
    if options.device == "cpu" and not options.quick:
        sys.exit("--device cpu is for trying the code; add --quick, or leave it out on a machine with a GPU")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; run this where there is one, or try the code with --device cpu --quick")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    scale, devices = TINY if options.quick else FULL, devices_of(options.device)
    with tempfile.TemporaryDirectory(prefix="april-gpu-") as made:
        folder = Path(made) / "model"
        make_model(folder, scale.shape, torch.float32 if options.device == "cpu" else torch.bfloat16)
        trainer = make_trainer(folder, Path(made), scale, devices.device)
        engine = TorchEngine(
            folder, slots=scale.slots, max_context=LONGEST_RESPONSE + LONGEST_PROMPT, device=str(devices.device)
        )
        rows = generate_and_train(trainer, engine, scale, scale.shape["vocab_size"])
        engine.close()
        rows += broadcasts(trainer, folder, devices, repeats=2 if options.quick else 7)
    dist.destroy_process_group()
    accelerators = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    report(rows, options.json, accelerators=accelerators, lane=devices.backend)


def make_trainer(folder: Path, runs: Path, scale: Scale, device: torch.device) -> Trainer:
    backends = "cpu:gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo"
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    config = Config.model_validate(
        {
            "model": {"path": folder},
            "data": {"path": "none.jsonl"},
            "run": {"dir": runs},
            "learner": {"ranks": 1, "device": device.type, "microbatch_tokens": scale.microbatch_tokens},
        }
    )
    return Trainer(config, device)


if __name__ == "__main__":
    main()
