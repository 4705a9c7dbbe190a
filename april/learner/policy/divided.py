"""Trial that shows whether ranks may share the rows of a model: a small model of the same kind has to compute the same
when threads in place of ranks share them."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from math import gcd
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import torch
from torch import Tensor
from transformers import AutoConfig

from april.learner.attention import PackedAttentionError
from april.learner.context import ContextGroup, objection_to_sharing, query_heads
from april.learner.loading import ModelError
from april.learner.model import Policy, empty_policy, load
from april.learner.packing import MicroBatch
from april.learner.policy import LENGTHS, is_of_machine, largest, packed_sequences, place_and_cause, small_model
from april.util.errors import NotTried
from april.util.text import first_line

APART = 1e-3
"""Largest difference of a log-probability that counts as rounding, nats."""
MEETING_S = 300.0
"""Longest wait of a thread for the others, seconds."""


def objection_to_division(folder: Path, size: int) -> str:
    """The reason why `size` ranks cannot share the packed rows of a folder's model (context parallelism), and what to
    do about it; empty if none is found. It is worded to follow the words "learner.context_parallel = `size`". Raises
    NotTried if memory or disk do not suffice to find out."""
    try:
        policy = empty_policy(folder, 1.0)
        if said := objection_to_sharing(policy.lm, size):
            return said
        model = small_model(lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False), policy.lm)
        with tempfile.TemporaryDirectory() as made:
            model.save_pretrained(made)
            policy = load(Path(made), 1.0)
        tried = gcd(size, *query_heads(model.config))
        distance = largest(by_threads(policy, tried) - by_threads(policy, 1))
        said = "" if distance <= APART else f"a token's log-probability would be another, by {distance:.2g} nats"
    except (ModelError, PackedAttentionError) as error:
        said = str(error)
    except Exception as error:
        if is_of_machine(error) or isinstance(error, BrokenBarrierError):
            found = f"{type(error).__name__}: {first_line(error)}"
            raise NotTried(f"whether ranks can share rows of {folder} could not be tried: {found}") from error
        said = place_and_cause(error)
    return said and f"is not for this model ({said}); set it to 1"


def by_threads(policy: Policy, size: int) -> Tensor:
    """Log-probabilities [K] that `policy` gives the scored tokens of random sequences (the same in each call), whose
    packed row is shared by `size` threads."""
    chance = torch.Generator().manual_seed(0)
    vocabulary = policy.lm.get_input_embeddings().weight.shape[0]
    row = packed_sequences(policy.lm, [torch.randint(3, vocabulary, (n,), generator=chance) for n in LENGTHS])
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(meeting.compute, policy, row, rank) for rank in range(size)]
        errors = [error for each in ranks if (error := each.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return ranks[0].result()


class Meeting:
    """Exchange of tensors between threads that stand in for ranks."""

    def __init__(self, size: int):
        self.barrier, self.tensors = Barrier(size, timeout=MEETING_S), [torch.empty(0)] * size

    def all_of(self, tensor: Tensor, rank: int) -> list[Tensor]:
        """The tensors of all threads, by their ranks; waits until each thread has given its own."""
        self.tensors[rank] = tensor
        self.barrier.wait()
        found = list(self.tensors)
        self.barrier.wait()
        return found

    @torch.no_grad()
    def compute(self, policy: Policy, row: MicroBatch, rank: int) -> Tensor:
        try:
            group = ThreadGroup(self, rank)
            part = group.part(row)
            logprobs, _ = group.whole(part, policy(part))
            return logprobs
        except BaseException:
            self.barrier.abort()
            raise


class ThreadGroup(ContextGroup):
    """A context group whose ranks are threads."""

    def __init__(self, meeting: Meeting, rank: int):
        super().__init__(meeting.barrier.parties, rank, None)
        self.meeting = meeting

    def all_to_all(self, sent: Tensor) -> Tensor:
        return torch.stack([each[self.rank] for each in self.meeting.all_of(sent, self.rank)])

    def total(self, values: Tensor) -> Tensor:
        return torch.stack(self.meeting.all_of(values, self.rank)).sum(0)
