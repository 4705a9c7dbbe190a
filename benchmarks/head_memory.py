"""Peak memory of log-probability, entropy and backward of a vocabulary head, measured in a process of its own."""

import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from april.learner.model import score_tokens

TOKENS, VOCABULARY, HIDDEN = 2048, 151_936, 256


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return score_tokens(hidden, weight, targets, 1.0)


def ordinary(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once, in fp32."""
    distribution = torch.log_softmax((hidden @ weight.T).float(), -1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, targets[:, None])[:, 0], entropies


def peak_bytes(score: Callable, quick: bool) -> int:
    """Resident memory above the inputs, the gradients of hidden states and weight included; both scores have one."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(score, TOKENS // 8 if quick else TOKENS, writer))
    process.start()
    writer.close()
    try:
        return reader.recv()
    finally:
        process.join()


def measure(score: Callable, tokens: int, writer) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    small = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True), torch.zeros(4, dtype=int)
    sum(score(*small)).sum().backward()  # imports and thread pools are not what is measured
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN).mul_(0.05).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (tokens,))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    logprobs, entropies = score(hidden, weight, targets)
    (logprobs.sum() + entropies.sum()).backward()
    writer.send(status_bytes("VmHWM") - before)


def status_bytes(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
