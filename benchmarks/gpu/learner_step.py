"""The learner's step on a card: speed, MFU and memory of `Trainer.step`, beside a bare packed loop and a padded one.

Models are random, of Qwen3's shapes; passes are in bf16 over fp32 master weights. Lengths are lognormal, median 512,
and the longest sequence of a step has 16,384 tokens. The bare loop is the same model of transformers with the same
attention on the same micro-batches, all in bf16 with AdamW: less work than the learner's, which keeps fp32 weights.
"""

import gc
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from bare_loop import LR, Bare, synchronize
from kernel_checks import check_kernels
from part import QWEN3_SHAPES, Part, make_model
from torch.profiler import ProfilerActivity
from transformers.utils import logging

from april.config import Config, LearnerSection
from april.launch import memory
from april.learner import attention, performance
from april.learner.batch import TrainingBatch, TrainSample
from april.learner.packing import input_tokens
from april.learner.trainer import ReadyBatch, Trainer
from april.wire.message import Version

GROUP = 8
BRIEF_S = 60.0
"""With fewer seconds than these all is tried on the smallest shape, with less work."""
KERNELS = 16
"""Kernels that a profile names."""
GIB = float(1 << 30)


@dataclass(frozen=True)
class Scale:
    """Work of a step."""

    shapes: tuple[str, ...]
    """The first is measured in full, the others once each."""
    groups: int
    median: int
    """Median length of responses, tokens."""
    longest: int
    """Length of the longest sequence, tokens; one in each step has it."""
    steps: int
    """Measured steps, behind one of warm-up."""

    @property
    def prompt(self) -> int:
        return self.longest // 64


FULL = Scale(("1.7B", "4B", "0.6B"), groups=6, median=512, longest=16_384, steps=2)
BRIEF = Scale(("0.6B",), groups=2, median=512, longest=8_192, steps=1)
TINY = Scale(("tiny", "tiny"), groups=2, median=32, longest=256, steps=1)


@dataclass(frozen=True)
class Variant:
    """Options of `[learner]` that change a step's speed and memory."""

    recompute: bool
    compiled: bool
    sequences: int
    """Longest sequences that a micro-batch has room for."""
    torch_attention: bool = False
    """Whether PyTorch's own flash attention is used where the package flash-attn-4 would be."""

    @property
    def name(self) -> str:
        name = f"{'recompute' if self.recompute else 'keep'}{'_compiled' * self.compiled}"
        return f"{name}{'_torch_attention' * self.torch_attention}"


SAFE, FASTEST = Variant(recompute=True, compiled=False, sequences=2), Variant(False, True, 1)
VARIANTS = (SAFE, FASTEST, replace(FASTEST, torch_attention=True), Variant(True, True, 2), Variant(False, False, 1))
"""By worth."""
COMPILE_S, BRIEF_COMPILE_S = 35.0, 10.0
"""Seconds that have to be left for compiling; a brief attempt is made though they may not suffice."""
OTHERS_S = 40.0
"""Seconds that the variants of least worth leave to the other shapes."""
HAS_COMPILE = "compile" in LearnerSection.model_fields


# --- work -------------------------------------------------------------------------------------------------------------


def longtail_batch(scale: Scale, vocabulary: int, step: int, groups: int) -> TrainingBatch:
    """Samples with random tokens and rewards; the first has the longest sequence."""
    rng, room = np.random.default_rng(step), scale.longest - scale.prompt
    lengths = rng.lognormal(math.log(scale.median), 1.25, groups * GROUP).clip(1, room).astype(int)
    lengths[0] = room + 1  # its last token is no input

    def sample(response: int) -> TrainSample:
        tokens = rng.integers(2, vocabulary, scale.prompt + response).astype(np.int32)
        logprobs = np.full(response, -math.log(vocabulary), np.float32)
        return TrainSample(tokens, scale.prompt, logprobs, float(rng.normal()), ((0, response, Version(0, 0)),))

    samples = list(map(sample, lengths.tolist()))
    return TrainingBatch(step, [samples[first : first + GROUP] for first in range(0, len(samples), GROUP)])


def tokens_of(batch: TrainingBatch) -> int:
    return sum(map(input_tokens, batch.samples))


def config_of(folder: Path, scale: Scale, variant: Variant, device: torch.device) -> Config:
    learner = {
        "ranks": 1, "device": device.type, "lr": LR, "compute": "bf16",
        "microbatch_tokens": variant.sequences * scale.longest, "activation_checkpointing": variant.recompute,
    }  # fmt: skip
    return Config.model_validate(
        {
            "model": {"path": folder},
            "data": {"path": "none.jsonl", "max_prompt_tokens": scale.prompt},
            "sampling": {"max_response_tokens": scale.longest - scale.prompt},
            "run": {"dir": folder.parent},
            "learner": learner | ({"compile": variant.compiled} if HAS_COMPILE else {}),
        }
    )


def planned_bytes(config: Config) -> float:
    """What the learner is calculated to take where it shares an accelerator: by `devices.share`."""
    shape = memory.read_shape(config.model.path)
    assert shape is not None
    parts = (memory.states_bytes, memory.activations_bytes, memory.head_bytes)
    return sum(part(config, shape) for part in parts) + memory.CONTEXT_BYTES


def fits(part: Part, what: str, config: Config) -> bool:
    """Whether the card has the calculated memory; records it if not."""
    if part.device.type != "cuda":
        return True
    total, planned = torch.cuda.mem_get_info()[1], planned_bytes(config)
    if planned > total:
        part.fact(f"{what}: left out", f"{planned / GIB:.1f} GiB are calculated, the card has {total / GIB:.1f}")
    return planned <= total


def empty(device: torch.device) -> None:
    """Give the memory of what is no longer used back to the device, and begin its peaks anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- the learner ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Steps of one variant of one shape."""

    trainer: Trainer
    ready: ReadyBatch
    batch: TrainingBatch
    tokens_per_s: float


class LearnerSteps:
    """Measures `Trainer.step` for one shape, one variant at a time."""

    def __init__(self, part: Part, scale: Scale, shape: str, folder: Path):
        self.part, self.scale, self.shape, self.folder = part, scale, shape, folder
        self.vocabulary = QWEN3_SHAPES[shape]["vocab_size"]
        self.mfu: dict[str, float] = {}
        """Median MFU of each variant."""
        self.speeds: dict[Variant, list[float]] = {}
        """Tokens/s of each variant's steps."""
        self.step_s = 1.0 if scale == BRIEF else 4.0
        """Seconds of the last step, by which it is seen whether there is time for more."""

    @property
    def name(self) -> str:
        return self.shape.lower().replace(".", "_")

    @contextmanager
    def trained(self, variant: Variant) -> Iterator[Measured]:
        """A trainer that has trained, with its rows recorded; its memory is given back at the end of the block."""
        part, device, suffix = self.part, self.part.device, f"{self.name}_{variant.name}"
        empty(device)
        began = time.perf_counter()
        config = config_of(self.folder, self.scale, variant, device)
        trainer = Trainer(config, device)
        synchronize(device)
        part.fact(f"{suffix}: seconds to load", round(time.perf_counter() - began, 2))
        began = time.perf_counter()
        trainer.step(longtail_batch(self.scale, self.vocabulary, 0, groups=1))
        synchronize(device)
        part.fact(f"{suffix}: seconds of the first step", round(time.perf_counter() - began, 2))
        try:
            yield self.measure(trainer, config, suffix, variant)
        finally:
            del trainer
            empty(device)

    def measure(self, trainer: Trainer, config: Config, suffix: str, variant: Variant) -> Measured:
        part, speeds, metrics = self.part, self.speeds.setdefault(variant, []), []
        for step in range(1, self.scale.steps + 1):
            batch = longtail_batch(self.scale, self.vocabulary, step, self.scale.groups)
            ready = trainer.prepare(batch)  # as in a run, where a thread does so during the step before
            synchronize(part.device)
            began = time.perf_counter()
            metrics.append(trainer.step(batch, ready))
            synchronize(part.device)
            self.step_s = time.perf_counter() - began
            speeds.append(tokens_of(batch) / self.step_s)
            if part.left_s < 2 * self.step_s and not part.tiny:
                break
        assert not any(each["update_skipped"] for each in metrics), metrics[-1]
        part.row(f"gpu_learner_tokens_per_s_{suffix}", speeds, "tokens/s")
        use = [each.get("mfu", each["tflop_per_s"]) for each in metrics]
        unit = "fraction" if "mfu" in metrics[0] else "TFLOP/s"
        part.row(f"gpu_mfu_{suffix}" if unit == "fraction" else f"gpu_tflop_per_s_{suffix}", use, unit)
        self.mfu[suffix] = statistics.median(use)
        for phase in ("forward_s", "backward_s", "optimizer_s", "metrics_s", "prepare_s"):
            part.row(f"gpu_{phase}_{suffix}", [each[phase] for each in metrics], "s")
        part.fact(f"{suffix}: micro-batches of a step", metrics[-1]["micro_batches"])
        self.record_memory(config, suffix)
        return Measured(trainer, ready, batch, statistics.median(speeds))

    def record_memory(self, config: Config, suffix: str) -> None:
        """Peak memory beside what was calculated. In use are also the context and what the allocator has reserved."""
        planned, part = planned_bytes(config), self.part
        part.fact(f"{suffix}: calculated memory, GiB", round(planned / GIB, 2))
        if part.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info()
        used, allocated = total - free, torch.cuda.max_memory_allocated()
        part.row(f"gpu_memory_used_gib_{suffix}", used / GIB, "GiB")
        part.row(f"gpu_memory_reserved_gib_{suffix}", torch.cuda.max_memory_reserved() / GIB, "GiB")
        part.row(f"gpu_memory_allocated_gib_{suffix}", allocated / GIB, "GiB")
        part.row(f"gpu_memory_plan_error_{suffix}", abs(planned / used - 1), "ratio")

    def profile(self, measured: Measured, variant: Variant) -> None:
        """Record which kernels a step of the first micro-batch spends its time in."""
        what = f"{self.name}_{variant.name}: kernels of one micro-batch"
        if not self.part.enough_time(what, 4 + self.step_s):
            return
        with self.part.attempt(what):
            ready = replace(measured.ready, minibatches=[measured.ready.minibatches[0][:1]])
            on_card = self.part.device.type == "cuda"
            activity = ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU
            with torch.profiler.profile(activities=[activity]) as profiler:
                measured.trainer.step(measured.batch, ready)
                synchronize(self.part.device)
            events = [
                (event.self_device_time_total if on_card else event.self_cpu_time_total, event.count, event.key[:70])
                for event in profiler.key_averages()
            ]
            events.sort(reverse=True)
            total = sum(spent for spent, _, _ in events)
            table = [f"{spent / 1e3:.1f} ms, {count} x {key}" for spent, count, key in events[:KERNELS]]
            self.part.fact(what, [f"{total / 1e3:.1f} ms in all", *table])

    def publication(self, trainer: Trainer) -> None:
        """Seconds in which all weights are collected on the CPU, from where they are published.

        As in a run, the weights before are held meanwhile; so the first two collections lock new pages.
        """
        seconds, state = [], {}
        for _ in range(4):
            began = time.perf_counter()
            state = trainer.weights()
            seconds.append(time.perf_counter() - began)
        self.part.row(f"gpu_weights_to_new_pages_s_{self.name}", seconds[:2], "s")
        self.part.row(f"gpu_weights_to_cpu_s_{self.name}", seconds[2:], "s")
        gigabytes = sum(tensor.nbytes for tensor in state.values()) / 1e9
        self.part.row(f"gpu_weights_to_cpu_gb_per_s_{self.name}", [gigabytes / each for each in seconds[2:]], "GB/s")


# --- beside the other loops -------------------------------------------------------------------------------------------


def compare(part: Part, steps: LearnerSteps, measured: Measured) -> None:
    """The learner and the bare loop in turns on the same micro-batches."""
    scale, device = steps.scale, part.device
    micros, tokens = [micro.packed for micro in measured.ready.micros], tokens_of(measured.batch)
    speeds = {"ours": [], "bare": []}
    with part.attempt("bare packed loop"):
        bare = Bare(steps.shape, scale.longest, SAFE.recompute, device)
        bare.step(micros[-1:])  # to warm up
        turns = {
            "bare": lambda: bare.step(micros),
            "ours": lambda: measured.trainer.step(measured.batch, measured.ready),
        }
        for turn in range(scale.steps):
            for side in list(turns)[:: 1 if turn % 2 == 0 else -1]:
                synchronize(device)
                began = time.perf_counter()
                turns[side]()
                synchronize(device)
                speeds[side].append(tokens / (time.perf_counter() - began))
            if part.left_s < 2.5 * steps.step_s and not part.tiny:
                break
        part.row("gpu_bare_tokens_per_s", speeds["bare"], "tokens/s")
        part.row("gpu_step_vs_bare", [a / b for a, b in zip(speeds["ours"], speeds["bare"], strict=True)], "ratio")


def compare_padded(part: Part, steps: LearnerSteps) -> None:
    """The padded loop on the samples of one of the learner's steps."""
    scale, batch = steps.scale, longtail_batch(steps.scale, steps.vocabulary, 1, steps.scale.groups)
    with part.attempt("padded loop"):
        bare = Bare(steps.shape, scale.longest, SAFE.recompute, part.device)
        padded = bare.step_padded(batch.samples, SAFE.sequences * scale.longest, part.left_s / 2)
        part.row("gpu_padded_tokens_per_s", padded, "tokens/s")
        part.row("gpu_step_vs_padded", [each / padded for each in steps.speeds[SAFE]], "ratio")


# --- the part ---------------------------------------------------------------------------------------------------------


def first_shape(part: Part, scale: Scale, folder: Path) -> LearnerSteps:
    steps, compiled = LearnerSteps(part, scale, scale.shapes[0], folder), False
    for variant in VARIANTS:
        if variant.compiled and not HAS_COMPILE:
            if variant.recompute:
                part.fact("torch.compile of the learner", "not built")
            continue
        if variant.torch_attention and kernel_of(part) != "flash_attention_4":
            continue
        what = f"{steps.shape} {variant.name}"
        compiling = variant.compiled * (5.0 if compiled else BRIEF_COMPILE_S if scale == BRIEF else COMPILE_S)
        others_s = OTHERS_S * (variant in VARIANTS[3:] and scale == FULL)
        if not part.enough_time(what, 5 + compiling + 3 * steps.step_s + others_s):
            continue
        if not fits(part, what, config_of(folder, scale, variant, part.device)):
            continue
        with part.attempt(what), attention_of(variant), steps.trained(variant) as measured:
            if variant == SAFE:
                with part.attempt("publication"):
                    steps.publication(measured.trainer)
            if variant == SAFE and part.enough_time("bare packed loop", 3 + 2 * steps.step_s):
                compare(part, steps, measured)
            compiled |= variant.compiled
            if variant == FASTEST:
                steps.profile(measured, variant)
            del measured
        if steps.mfu:
            part.fact("MFU so far", {name: round(value, 3) for name, value in steps.mfu.items()})
    if steps.mfu and scale.shapes[0] == "1.7B":
        part.row("gpu_mfu_1_7b", max(steps.mfu.values()), "fraction")
    ours, theirs = (steps.speeds.get(each) for each in (FASTEST, replace(FASTEST, torch_attention=True)))
    if ours and theirs:
        part.row("gpu_step_flash_4_vs_torch", statistics.median(ours) / statistics.median(theirs), "ratio")
    return steps


def kernel_of(part: Part) -> str:
    return attention.kernel_for(part.device, torch.bfloat16, 128)


@contextmanager
def attention_of(variant: Variant) -> Iterator[None]:
    """Lets the learner and the bare loop use the variant's attention."""
    found = attention.kernel_for
    if variant.torch_attention:
        attention.kernel_for = lambda *_: "variable_length"
    try:
        yield
    finally:
        attention.kernel_for = found


def other_shape(part: Part, scale: Scale, shape: str) -> None:
    big = shape == "4B"
    if not part.enough_time(shape, 30.0 if big else 12.0):
        return
    scale = replace(scale, groups=2, steps=1) if big else scale
    with part.attempt(shape), model_folder(part, shape, scale) as folder:
        steps = LearnerSteps(part, scale, shape, folder)
        variant = replace(SAFE, sequences=1) if big else SAFE
        if not fits(part, shape, config_of(folder, scale, variant, part.device)):
            return
        with steps.trained(variant):
            pass
        if HAS_COMPILE and part.enough_time(f"{shape} compiled", 15 + 3 * steps.step_s):
            with steps.trained(replace(variant, compiled=True)):
                pass


@contextmanager
def model_folder(part: Part, shape: str, scale: Scale) -> Iterator[Path]:
    """A folder with a random bf16 model of `shape`, in memory where there is room."""
    parameters = 2 * 5e9 if shape == "4B" else 2 * 2.5e9
    in_memory = Path("/dev/shm")
    roomy = in_memory.is_dir() and shutil.disk_usage(in_memory).free > parameters
    with tempfile.TemporaryDirectory(prefix="april-gpu-", dir=in_memory if roomy else None) as made:
        began = time.perf_counter()
        folder = make_model(Path(made) / "model", shape, torch.bfloat16, scale.longest, part.device.type)
        empty(part.device)
        part.fact(f"{shape}: seconds to make the model", round(time.perf_counter() - began, 2))
        yield folder


def join_alone(device: torch.device) -> None:
    """A process group of this process alone."""
    if device.type == "cuda":
        torch.cuda.set_device(0)
    backends = "cpu:gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo"
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    part = Part.from_command_line(__doc__.partition("\n")[0])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    scale = TINY if part.tiny else BRIEF if part.left_s < BRIEF_S else FULL
    if part.tiny:
        torch.compile = partial(torch.compile, backend="aot_eager")  # the default one calls a C++ compiler for a minute
    join_alone(part.device)
    part.fact("attention kernel", kernel_of(part))
    if part.device.type == "cuda":
        part.fact("peak TFLOP/s", performance.peak_tflops(part.device))
    check_kernels(part)
    empty(part.device)
    try:
        steps = None
        with part.attempt(scale.shapes[0]), model_folder(part, scale.shapes[0], scale) as folder:
            steps = first_shape(part, scale, folder)
        for shape in scale.shapes[1:]:
            other_shape(part, scale, shape)
        if steps is not None and steps.speeds.get(SAFE) and part.enough_time("padded loop", 4 * steps.step_s):
            compare_padded(part, steps)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
