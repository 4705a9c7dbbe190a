"""What the learner trains on: finished samples in groups, one batch a step.

Rank 0 receives a batch; `share_batch` hands it to the other ranks as one byte tensor, without pickle.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from april.data.support import Support
from april.wire.training import GroupHead, Stay
from april.wire.version import Version

NO_MORE_BATCHES = -1
"""sent in place of the byte count when the run is over"""


@dataclass(frozen=True, eq=False)
class TrainSample:
    """One finished response with its prompt, P + R tokens. `ValueError` if the parts do not fit together."""

    tokens: np.ndarray
    """int32 [P + R]"""
    prompt_tokens: int
    """P, at least 1: the first response token needs something to be predicted from"""
    logprobs: np.ndarray
    """float32 [R]: behaviour log-probabilities, log-softmax(logits / temperature) at sampling, over the support where
    there is one; 0 for observations"""
    reward: float
    segments: tuple[tuple[int, int, Version], ...]
    """(start, end, version): response tokens start..end were sampled by that version, in order; those in between are
    observations of an environment, which are read and not trained"""
    support: Support | None = None
    """of the R tokens, where the distribution was cut: log-probabilities are renormalised over it"""
    group: int = -1
    """the number of its group in the run's books; -1 where nobody has said it, as in a batch made by hand"""
    index: int = -1
    """its place in the group as that was opened, of which some may have been lost"""
    finish_reason: str = ""
    details: Mapping[str, float] = field(default_factory=dict)
    """what its reward is made of"""
    stays: tuple[Stay, ...] = ()
    """where it has been, and when"""
    opened_at: float = 0.0
    delivered_at: float = 0.0
    """Unix seconds; 0 where nobody has said it"""
    branch: int = 0
    """of the session of an agent, whose branches are a row each; what they share is trained with one of them"""
    chunks: tuple[tuple[int, float], ...] = ()
    """(response tokens that there were, Unix seconds) of each chunk, where the sample is kept to be read"""
    parent: int = 0
    shared: int = 0
    """of a branch, to be read: the one that it has left, and how many tokens at its beginning are that one's"""

    def __post_init__(self):
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens = {self.prompt_tokens}; a sample needs at least 1 prompt token")
        if len(self.logprobs) != self.response_tokens:
            raise ValueError(
                f"{len(self.logprobs)} log-probabilities for {len(self.tokens)} tokens of which "
                f"{self.prompt_tokens} are the prompt; each response token needs exactly one"
            )
        if self.support and not self.support.fits(self.response_tokens):
            raise ValueError(
                f"a support of {len(self.support.counts)} counts and {len(self.support.ids)} ids for "
                f"{self.response_tokens} response tokens; each needs a count, and the counts add up to the ids"
            )

    @property
    def response_tokens(self) -> int:
        """R; 0 is allowed and trains nothing."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def sampled_tokens(self) -> int:
        """K: those of the response that the policy has sampled, the only ones with a loss."""
        return sum(end - start for start, end, _ in self.segments)

    @cached_property
    def sampled(self) -> np.ndarray:
        """int64 [K]: their places in the response."""
        spans = [np.arange(start, end) for start, end, _ in self.segments]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)


ToldGroup = tuple[GroupHead, list[TrainSample]]
"""a group, and what the broker says of it"""


@dataclass(frozen=True, eq=False)
class Batch:
    """The groups that turn weights `step` into weights `step + 1`; a group may have lost samples."""

    step: int
    groups: list[list[TrainSample]]
    origins: list[tuple[int, bytes]] = field(default_factory=list)
    """of each group whose prompt the trainer has brought: number of the prompt, and what was brought beside it"""
    discards: list[ToldGroup] = field(default_factory=list)
    """what was discarded since the batch before and is kept to be read; rank 0's"""

    @property
    def samples(self) -> list[TrainSample]:
        """All samples, group by group."""
        return [sample for group in self.groups for sample in group]


Session = list[TrainSample]
"""the rows of a sample: one, or those of the branches of an agent's session"""


def sessions(group: list[TrainSample]) -> list[Session]:
    """The rows of a group, those of one session together: what counts as one where samples are compared or counted."""
    found: list[Session] = []
    for sample in group:
        if sample.branch and found and found[-1][0].index == sample.index:
            found[-1].append(sample)
        else:
            found.append([sample])
    return found


class FlatBatch(msgspec.Struct, omit_defaults=True):
    """A batch as a few flat columns, one entry a sample; tokens, log-probabilities and supports joined end to end."""

    step: int
    group_sizes: list[int]
    prompt_tokens: list[int]
    response_tokens: list[int]
    rewards: list[float]
    segments: list[list[tuple[int, int, int, int]]]
    tokens: bytes
    logprobs: bytes
    support_counts: bytes = b""
    """of all samples, or none"""
    support_ids: bytes = b""
    names: list[tuple[int, int, int, str]] = []
    """(group, index, branch, finish reason)"""
    details: list[dict[str, float]] = []
    stays: list[tuple[Stay, ...]] = []
    times: list[tuple[float, float]] = []
    """(opened, delivered)"""
    origins: list[tuple[int, bytes]] = []


def encode(batch: Batch) -> bytes:
    """MessagePack, arrays little-endian; `decode` gives an equal batch back, without what is only kept to be read."""
    samples = batch.samples
    supports = [sample.support for sample in samples if sample.support]
    if supports and len(supports) < len(samples):
        raise ValueError(f"{len(supports)} of {len(samples)} samples have a support; all of a batch do, or none")
    return msgspec.msgpack.encode(
        FlatBatch(
            step=batch.step,
            group_sizes=[len(group) for group in batch.groups],
            prompt_tokens=[sample.prompt_tokens for sample in samples],
            response_tokens=[sample.response_tokens for sample in samples],
            rewards=[float(sample.reward) for sample in samples],
            segments=[[(start, end, *version) for start, end, version in sample.segments] for sample in samples],
            tokens=b"".join(np.asarray(sample.tokens, "<i4").tobytes() for sample in samples),
            logprobs=b"".join(np.asarray(sample.logprobs, "<f4").tobytes() for sample in samples),
            support_counts=b"".join(np.asarray(support.counts, "<i4").tobytes() for support in supports),
            support_ids=b"".join(np.asarray(support.ids, "<i4").tobytes() for support in supports),
            names=[(sample.group, sample.index, sample.branch, sample.finish_reason) for sample in samples],
            details=[dict(sample.details) for sample in samples],
            stays=[sample.stays for sample in samples],
            times=[(sample.opened_at, sample.delivered_at) for sample in samples],
            origins=batch.origins,
        )
    )


def decode(data: bytes | bytearray | memoryview) -> Batch:
    """The batch that `encode` was given. The arrays are read-only views. `msgspec.DecodeError` on other bytes."""
    flat = msgspec.msgpack.decode(data, type=FlatBatch)
    all_tokens, all_logprobs = np.frombuffer(flat.tokens, "<i4"), np.frombuffer(flat.logprobs, "<f4")
    counts, support_ids = np.frombuffer(flat.support_counts, "<i4"), np.frombuffer(flat.support_ids, "<i4")
    samples, token_at, logprob_at, id_at = [], 0, 0, 0
    names = flat.names or [(-1, -1, 0, "")] * len(flat.rewards)
    columns = zip(flat.prompt_tokens, flat.response_tokens, flat.rewards, flat.segments, names, strict=True)
    told = zip(flat.details, flat.stays, flat.times, strict=True) if flat.times else repeat(({}, (), (0.0, 0.0)))
    for (prompt, response, reward, segments, (number, index, branch, finish_reason)), (details, stays, times) in zip(
        columns, told, strict=False
    ):
        of_sample = counts[logprob_at : logprob_at + response]
        ids = int(of_sample.sum())
        samples.append(
            TrainSample(
                tokens=all_tokens[token_at : token_at + prompt + response],
                prompt_tokens=prompt,
                logprobs=all_logprobs[logprob_at : logprob_at + response],
                reward=reward,
                segments=tuple((start, end, Version(*version)) for start, end, *version in segments),
                support=Support(of_sample, support_ids[id_at : id_at + ids]) if len(counts) else None,
                group=number,
                index=index,
                finish_reason=finish_reason,
                details=details,
                stays=stays,
                opened_at=times[0],
                delivered_at=times[1],
                branch=branch,
            )
        )
        token_at, logprob_at, id_at = token_at + prompt + response, logprob_at + response, id_at + ids
    groups, first = [], 0
    for size in flat.group_sizes:
        groups.append(samples[first : first + size])
        first += size
    return Batch(flat.step, groups, flat.origins)


def share_batch(batch: Batch | None, group: dist.ProcessGroup | None = None) -> Batch | None:
    """Rank 0's batch on every rank; None there (the run is over) is None everywhere. Collective.

    What is only kept to be read stays on rank 0. The other ranks pass None and wait here for rank 0; `group` must carry
    CPU tensors (default: the default group).
    """
    leader = dist.get_rank() == 0
    data = encode(batch) if leader and batch is not None else b""
    size = torch.tensor(NO_MORE_BATCHES if batch is None else len(data))
    dist.broadcast(size, src=0, group=group)
    if size.item() == NO_MORE_BATCHES:
        return None
    size = int(size.item())
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if leader else torch.empty(size, dtype=torch.uint8)
    dist.broadcast(buffer, src=0, group=group)
    return batch if leader else decode(memoryview(buffer.numpy()))
